"""The bytes of one version: how tensors are frozen into them, and loaded from them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import msgspec

from robustrl.errors import CorruptChunkError, WeightError, WeightMismatchError
from robustrl.reconnect.manifest import (
    ITEM_BYTES,
    Manifest,
    Piece,
    TensorSpec,
    aligned,
    chunk_digest,
    cover,
    version_digest,
)
from robustrl.reconnect.memory import Buffer, Mapped, Pool
from robustrl.reconnect.sharding import Layout, Slice, box_of

if TYPE_CHECKING:
    import torch

SLAB_BYTES: Final = 4 << 20
"""A tensor is copied in slabs of this size, so that its first chunks are digested while its last are copied."""
SMALL_BYTES: Final = 256 << 10
"""Below this, handing work to another thread costs more than the work."""


class Content:
    """A whole version: manifest and bytes. `digest` names it, whatever versions it is published under.

    Args:
        manifest: what the bytes are.
        buffer: the bytes, ours or mapped from a peer.
        pieces: the chunks that are there, where not all are.
        release: called when nobody refers to the content any more; the buffer can then be used again.
    """

    def __init__(
        self,
        manifest: Manifest,
        buffer: Buffer | Mapped,
        release: Callable[[], None] | None = None,
        pieces: Sequence[Piece] | None = None,
    ) -> None:
        self.manifest = manifest
        self.buffer = buffer
        self.pieces = pieces
        self.present = None if pieces is None else cover(pieces)
        self.digest = manifest.digest()
        self.encoded = manifest.encode()
        if release is not None:
            weakref.finalize(self, release).atexit = False

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


def tensor_in(buffer: Buffer | Mapped, spec: TensorSpec) -> torch.Tensor:
    """A tensor whose memory is its place in the buffer (no copy), valid for as long as the buffer is referred to.

    Its memory may be read-only: writing to it would then end the process.
    """
    import numpy as np
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    address: int = np.frombuffer(buffer.view, np.uint8).ctypes.data  # torch takes no read-only buffer as it is
    memory = (ctypes.c_ubyte * spec.nbytes).from_address(address + spec.offset)
    return torch.frombuffer(memory, dtype=torch.uint8, count=spec.nbytes).view(dtype).reshape(spec.shape)


def freeze(
    tensors: Mapping[str, torch.Tensor],
    chunk_bytes: int,
    pool: Pool | None = None,
    slices: Mapping[str, Slice] | None = None,
) -> Content:
    """Copies tensors (any device, any strides) into a buffer and digests them.

    Args:
        tensors: by name.
        chunk_bytes: how much has one digest.
        pool: where the buffer comes from.
        slices: which part of a global tensor the tensors of these names are.

    Raises:
        WeightError: a tensor cannot be published (sparse, quantized, a dtype that has no name here), or the memory
            for a copy cannot be had.
    """
    import torch

    layout = _lay_out(tensors, slices or {})
    size = max((spec.offset + spec.nbytes for spec, _ in layout), default=0)
    pool = Pool() if pool is None else pool
    buffer = pool.take(size)
    try:
        with torch.no_grad(), ThreadPoolExecutor(1, "robustrl-digest") as digester:
            digests: dict[int, list[Future[bytes] | bytes]] = {}
            for spec, tensor in layout:
                if spec.nbytes and spec.offset not in digests:
                    digests[spec.offset] = list(_copy(buffer, spec, tensor, chunk_bytes, digester))
            chunks = {
                offset: b"".join(part if isinstance(part, bytes) else part.result() for part in parts)
                for offset, parts in digests.items()
            }
    except BaseException:
        pool.give(buffer)
        raise
    specs = (
        msgspec.structs.replace(spec, chunks=chunks[spec.offset] if spec.nbytes else b"") for spec, _ in layout
    )
    return Content(Manifest(chunk_bytes, tuple(specs)), buffer, lambda: pool.give(buffer))


def _lay_out(tensors: Mapping[str, torch.Tensor], slices: Mapping[str, Slice]) -> list[tuple[TensorSpec, torch.Tensor]]:
    import torch

    layout: list[tuple[TensorSpec, torch.Tensor]] = []
    places: dict[tuple[object, ...], int] = {}
    free = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or dtype not in ITEM_BYTES:
            raise WeightError(f"tensor {name!r} cannot be published", why=f"{tensor.layout} of {tensor.dtype}")
        part = slices.get(name)
        if part is not None and part.size != tuple(tensor.shape):
            raise WeightError(f"tensor {name!r} is not the slice it is said to be", why=f"{tensor.shape}, {part}")
        offset = 0
        if tensor.numel():
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            offset = places.setdefault(key, free)
            if offset == free:
                free = aligned(free + tensor.numel() * ITEM_BYTES[dtype])
        whole, start = (part.whole, part.start) if part else ((), ())
        layout.append((TensorSpec(name, dtype, tuple(tensor.shape), offset, b"", whole, start), tensor))
    return layout


def _copy(
    buffer: Buffer, spec: TensorSpec, tensor: torch.Tensor, chunk_bytes: int, digester: ThreadPoolExecutor
) -> Iterator[Future[bytes] | bytes]:
    """Copies one tensor and yields the digests of its chunks, in order."""
    target = tensor_in(buffer, spec)
    digested = 0
    if spec.nbytes <= SMALL_BYTES:
        target.copy_(tensor)
        yield digest_chunks(buffer.view, spec.offset, spec.offset + spec.nbytes, chunk_bytes)
        return
    if tensor.is_contiguous():
        source, target = tensor.reshape(-1), target.reshape(-1)
    else:
        source = tensor
    rows = len(source)
    step = max(1, SLAB_BYTES * rows // spec.nbytes)
    for row in range(0, rows, step):
        target[row : row + step].copy_(source[row : row + step])
        copied = min(row + step, rows) * (spec.nbytes // rows)
        end = spec.nbytes if copied == spec.nbytes else copied // chunk_bytes * chunk_bytes
        if end > digested:
            yield digester.submit(digest_chunks, buffer.view, spec.offset + digested, spec.offset + end, chunk_bytes)
            digested = end


def digest_chunks(view: memoryview, start: int, end: int, chunk_bytes: int) -> bytes:
    """The digests of the chunks between two places of a buffer, one after another."""
    return b"".join(chunk_digest(view[at : min(at + chunk_bytes, end)]) for at in range(start, end, chunk_bytes))


def weights_digest(tensors: Mapping[str, torch.Tensor], chunk_bytes: int) -> str:
    """The digest that these tensors would be published under."""
    return freeze(tensors, chunk_bytes).digest


def load(contents: Content | Sequence[Content], target: Mapping[str, torch.Tensor], layout: Layout | None = None) -> str:
    """Copies a version into live tensors and returns its digest. Checks every tensor before it touches the first.

    Args:
        contents: the version, or its parts in order.
        target: by name.
        layout: which slice of a global tensor the targets of these names are.

    Raises:
        WeightMismatchError: names, a shape or a dtype differ; nothing was changed.
    """
    import torch

    parts = [contents] if isinstance(contents, Content) else list(contents)
    specs: dict[str, list[tuple[Content, TensorSpec]]] = {}
    for content in parts:
        for spec in content.manifest.tensors:
            specs.setdefault(spec.name, []).append((content, spec))
    plan: list[tuple[torch.Tensor, Content, TensorSpec, Slice]] = []
    for name in sorted(specs.keys() | target.keys()):
        if name not in target:
            raise WeightMismatchError(f"tensor {name!r} was published and the receiver has none of that name")
        if name not in specs:
            raise WeightMismatchError(f"the receiver's tensor {name!r} was not published")
        ours = target[name]
        wanted = (layout or {}).get(name) or Slice.all(tuple(ours.shape))
        dtype = str(ours.dtype).removeprefix("torch.")
        missing, seen = wanted.count, set()
        for content, spec in specs[name]:
            box = box_of(spec)
            if (box.whole, spec.dtype) != (wanted.whole, dtype) or wanted.size != tuple(ours.shape):
                raise WeightMismatchError(
                    f"tensor {name!r} does not fit",
                    why=f"published are {spec.dtype} {list(box.whole)}, the receiver has {dtype} {list(ours.shape)}"
                    + (f" as its part of {list(wanted.whole)}" if wanted.whole != tuple(ours.shape) else ""),
                )
            common = box.meet(wanted)
            if common is not None and box not in seen:  # ranks may hold the same slice: one of them is enough
                seen.add(box)
                missing -= common.count
                plan.append((ours[common.within(wanted)], content, spec, common))
        if missing:
            raise WeightMismatchError(
                f"tensor {name!r} was not published whole",
                why=f"the slices leave {missing} of {wanted.count} elements open, or overlap",
            )
    with torch.no_grad():
        for ours, content, spec, common in plan:
            ours.copy_(tensor_in(content.buffer, spec)[common.within(box_of(spec))])
    return version_digest([content.digest for content in parts])
