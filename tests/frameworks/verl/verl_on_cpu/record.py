"""What a job says of itself to the test that watches it: JSON lines in the file ``$VERL_ON_CPU_RECORD``.

    {"what": "serving", "rank": 0, "pid": 17}                 a light replica answers
    {"what": "sent", "version": 3, "digest": "..."}           the trainer gave these weights to its checkpoint engine
    {"what": "loaded", "version": 3, "digest": "...", "rank": 0}   a light replica holds them

Digests are taken by the harness itself, whichever engine is between, of every parameter's name, type, shape and bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Iterable
from types import ModuleType
from typing import Any

import torch


def tell(what: str, **facts: Any) -> None:
    """Appends a line. One write: lines of several processes do not mix."""
    line = json.dumps({"what": what, "time": time.time(), "pid": os.getpid(), **facts}) + "\n"
    fd = os.open(os.environ["VERL_ON_CPU_RECORD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


class Digest:
    """Of a set of named tensors, whatever their order."""

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        part = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        part.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        self._parts[name] = part.digest()

    def hex(self) -> str:
        return hashlib.sha256(b"".join(part for _, part in sorted(self._parts.items()))).hexdigest()


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = Digest()
    for name, tensor in tensors:
        digest.add(name, tensor)
    return digest.hex()


def watch_engines(base: ModuleType) -> None:
    """Has each checkpoint engine's `send_weights` tell what it was given, in the trainer's master rank."""
    make = base.CheckpointEngineRegistry.new

    def new(backend: str, *args: Any, **kwargs: Any) -> Any:
        engine = make(backend, *args, **kwargs)
        if kwargs.get("is_master"):
            engine.send_weights = _telling(engine.send_weights)
        return engine

    base.CheckpointEngineRegistry.new = new


def _telling(send: Any) -> Any:
    async def send_weights(weights: Any, global_steps: int | None = None) -> Any:
        from verl.workers.rollout.utils import ensure_async_iterator

        digest = Digest()

        async def seen() -> AsyncIterator[tuple[str, torch.Tensor]]:
            async for name, tensor in ensure_async_iterator(weights):
                digest.add(name, tensor)
                yield name, tensor
            tell("sent", version=global_steps, digest=digest.hex())

        return await send(seen(), global_steps=global_steps)

    return send_weights
