"""One digest for a whole trainer state: what two runs must have in common to be the same run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash


def state_digest(state: Mapping[str, Any]) -> str:
    """The xxh3-128 of nested mappings, sequences, plain values and CPU tensors, by content alone."""
    hasher = xxhash.xxh3_128()
    _feed(hasher, state)
    return str(hasher.hexdigest())


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        hasher.update(f"m{len(value)}".encode())
        for key in sorted(value, key=str):
            hasher.update(f"k{key!r}".encode())
            _feed(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        hasher.update(f"s{len(value)}".encode())
        for item in value:
            _feed(hasher, item)
    elif hasattr(value, "untyped_storage"):
        import torch

        hasher.update(f"t{value.dtype}{tuple(value.shape)}".encode())
        hasher.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    else:
        hasher.update(f"v{value!r}".encode())
