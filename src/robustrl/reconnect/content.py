"""The bytes of one version in memory: a flat buffer that is written once and then only read.

The buffer is a memfd: it has no name, so nothing is left of it when its process is killed, and a peer on the same
host can be given its descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from robustrl.errors import CorruptChunkError, WeightError, WeightMismatchError
from robustrl.reconnect.manifest import (
    ITEM_BYTES,
    Manifest,
    Piece,
    TensorSpec,
    aligned,
    chunk_digest,
)

if TYPE_CHECKING:
    import torch


class Buffer:
    """`size` bytes of shared memory, freed with the last reference. Raises WeightError when memory lacks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("robustrl-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        try:
            # Taking the pages here turns a lack of memory into an error; touched later, it would be a SIGBUS.
            os.posix_fallocate(self.fd, 0, max(size, 1))
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.memory = mmap.mmap(self.fd, max(size, 1))
        except OSError as error:
            why = "out of memory" if error.errno in (errno.ENOSPC, errno.ENOMEM) else str(error)
            raise WeightError(f"cannot take {size} bytes for a weight version", why=why) from error
        self.view = memoryview(self.memory)[:size]


class Content:
    """A whole version: manifest and bytes. `digest` names it, whatever versions it is published under."""

    def __init__(self, manifest: Manifest, buffer: Buffer) -> None:
        self.manifest = manifest
        self.buffer = buffer
        self.digest = manifest.digest()
        self.encoded = manifest.encode()

    @property
    def size(self) -> int:
        return self.buffer.size


def verify(piece: Piece, view: memoryview) -> None:
    """Raises CorruptChunkError unless the chunk in `view` (the whole buffer) has its digest."""
    if chunk_digest(view[piece.start : piece.start + piece.length]) != piece.digest:
        raise CorruptChunkError(
            f"a chunk of tensor {piece.tensor!r} is corrupt",
            why=f"bytes {piece.start} to {piece.start + piece.length} do not have the manifest's digest",
        )


def tensor_in(buffer: Buffer, spec: TensorSpec) -> torch.Tensor:
    """A tensor whose memory is its place in the buffer (no copy)."""
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    flat = torch.frombuffer(buffer.memory, dtype=torch.uint8, count=spec.nbytes, offset=spec.offset)
    return flat.view(dtype).reshape(spec.shape)


def freeze(tensors: Mapping[str, torch.Tensor], chunk_bytes: int) -> Content:
    """Copies tensors (any device, any strides) into a new buffer and digests them.

    Raises:
        WeightError: a tensor cannot be published (sparse, quantized, a dtype that has no name here).
    """
    import torch

    layout: list[tuple[TensorSpec, torch.Tensor]] = []
    places: dict[tuple[object, ...], int] = {}
    free = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or dtype not in ITEM_BYTES:
            raise WeightError(f"tensor {name!r} cannot be published", why=f"{tensor.layout} of {tensor.dtype}")
        offset = 0
        if tensor.numel():
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            offset = places.setdefault(key, free)
            if offset == free:
                free = aligned(free + tensor.numel() * ITEM_BYTES[dtype])
        layout.append((TensorSpec(name, dtype, tuple(tensor.shape), offset), tensor))
    size = max((spec.offset + spec.nbytes for spec, _ in layout), default=0)
    buffer = Buffer(size)
    digests: dict[int, bytes] = {}
    specs: list[TensorSpec] = []
    with torch.no_grad():
        for spec, tensor in layout:
            if spec.nbytes and spec.offset not in digests:
                tensor_in(buffer, spec).copy_(tensor)
                end = spec.offset + spec.nbytes
                digests[spec.offset] = b"".join(
                    chunk_digest(buffer.view[start : min(start + chunk_bytes, end)])
                    for start in range(spec.offset, end, chunk_bytes)
                )
            chunks = digests[spec.offset] if spec.nbytes else b""
            specs.append(TensorSpec(spec.name, spec.dtype, spec.shape, spec.offset, chunks))
    return Content(Manifest(chunk_bytes, tuple(specs)), buffer)


def weights_digest(tensors: Mapping[str, torch.Tensor], chunk_bytes: int) -> str:
    """The digest that these tensors would be published under."""
    return freeze(tensors, chunk_bytes).digest


def load(content: Content, target: Mapping[str, torch.Tensor]) -> str:
    """Copies a version into live tensors and returns its digest. Checks every tensor before it touches the first.

    Raises:
        WeightMismatchError: names, a shape or a dtype differ; nothing was changed.
    """
    import torch

    specs = {spec.name: spec for spec in content.manifest.tensors}
    for name in sorted(specs.keys() | target.keys()):
        if name not in target:
            raise WeightMismatchError(f"tensor {name!r} was published and the receiver has none of that name")
        if name not in specs:
            raise WeightMismatchError(f"the receiver's tensor {name!r} was not published")
        spec, ours = specs[name], target[name]
        dtype = str(ours.dtype).removeprefix("torch.")
        if (spec.shape, spec.dtype) != (tuple(ours.shape), dtype):
            raise WeightMismatchError(
                f"tensor {name!r} does not fit",
                why=f"published are {spec.dtype} {list(spec.shape)}, the receiver has {dtype} {list(ours.shape)}",
            )
    with torch.no_grad():
        for name, spec in specs.items():
            if spec.nbytes:
                target[name].copy_(tensor_in(content.buffer, spec))
    return content.digest
