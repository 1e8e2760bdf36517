"""The bytes of one version: how tensors are frozen into them, and loaded from them."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from robustrl.errors import CorruptChunkError, WeightError, WeightMismatchError
from robustrl.reconnect import cuda
from robustrl.reconnect.arrival import Arrival
from robustrl.reconnect.manifest import (
    ITEM_BYTES,
    ChunkDigest,
    Manifest,
    Piece,
    TensorSpec,
    aligned,
    chunk_digest,
    cover,
    version_digest,
)
from robustrl.reconnect.memory import Buffer, DeviceBuffer, Mapped, Pool, in_host
from robustrl.reconnect.sharding import Layout, Slice, box_of

if TYPE_CHECKING:
    import torch

    from robustrl.reconnect.memory import Memory

SLAB_BYTES: Final = 4 << 20
"""Tensors are copied in slabs of about this size, several at a time."""
STRIDE_BYTES: Final = 256 << 10
"""What is copied before it is digested: source and copy fit a processor's own cache."""
SMALL_BYTES: Final = 256 << 10
"""Below this, handing work to another thread costs more than the work."""
WORKERS: Final = min(4, os.cpu_count() or 1)
"""Threads that copy and digest. One rarely uses all the bandwidth that memory has."""

T = TypeVar("T")


class Content:
    """A whole version: manifest and bytes. `digest` names it, whatever versions it is published under.

    Args:
        manifest: what the bytes are.
        buffer: the bytes, ours or mapped from a peer.
        pieces: the chunks that are there, where not all are.
        release: called when nobody refers to the content any more; the buffer can then be used again.
        arrival: how far the bytes have come, where they are still on their way.
    """

    def __init__(
        self,
        manifest: Manifest,
        buffer: Buffer | DeviceBuffer | Mapped,
        release: Callable[[], None] | None = None,
        pieces: Sequence[Piece] | None = None,
        arrival: Arrival | None = None,
    ) -> None:
        self.manifest = manifest
        self.buffer = buffer
        self.arrival = arrival
        self.pieces = pieces
        self.present = None if pieces is None else cover(pieces)
        self.digest = manifest.digest()
        self.encoded = manifest.encode()
        if release is not None:
            weakref.finalize(self, release).atexit = False

    @property
    def size(self) -> int:
        return self.buffer.size

    @property
    def arrived(self) -> bool:
        """Whether all the bytes that will be there are."""
        return self.arrival is None or self.arrival.upto >= self.size

    async def until(self, upto: int) -> None:
        """See `Arrival.until`."""
        if self.arrival is not None:
            await self.arrival.until(upto)


def verify(piece: Piece, view: Memory) -> None:
    """Raises CorruptChunkError unless the chunk in `view` (the whole buffer) has its digest."""
    if chunk_digest(in_host(view[piece.start : piece.start + piece.length])) != piece.digest:
        raise CorruptChunkError(
            f"a chunk of tensor {piece.tensor!r} is corrupt",
            why=f"bytes {piece.start} to {piece.start + piece.length} do not have the manifest's digest",
        )


def tensor_in(buffer: Buffer | DeviceBuffer | Mapped, spec: TensorSpec) -> torch.Tensor:
    """A tensor whose memory is its place in the buffer (no copy), valid for as long as the buffer is referred to.

    Its memory may be read-only: writing to it would then end the process.
    """
    import numpy as np
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    if isinstance(buffer, DeviceBuffer):
        return buffer.view[spec.offset : spec.offset + spec.nbytes].view(dtype).reshape(spec.shape)
    address: int = np.frombuffer(buffer.view, np.uint8).ctypes.data  # torch takes no read-only buffer as it is
    memory = (ctypes.c_ubyte * spec.nbytes).from_address(address + spec.offset)
    return torch.frombuffer(memory, dtype=torch.uint8, count=spec.nbytes).view(dtype).reshape(spec.shape)


def freeze(
    tensors: Mapping[str, torch.Tensor],
    chunk_bytes: int,
    pool: Pool | None = None,
    slices: Mapping[str, Slice] | None = None,
    driver: cuda.Driver | None = None,
) -> Content:
    """Copies tensors (any device, any strides) into a buffer and digests them.

    Args:
        tensors: by name.
        chunk_bytes: how much has one digest.
        pool: where the buffer comes from.
        slices: which part of a global tensor the tensors of these names are.
        driver: of the device that tensors may lie on (default: this machine's, if it has one).

    Raises:
        WeightError: a tensor cannot be published (sparse, quantized, a dtype that has no name here), or the memory
            for a copy cannot be had.
    """
    driver = cuda.find_driver() if driver is None else driver
    layout = _lay_out(tensors, slices or {})
    size = max((spec.offset + spec.nbytes for spec, _ in layout), default=0)
    pool = Pool() if pool is None else pool
    buffer = pool.take(size)
    try:
        jobs: dict[int, list[Callable[[], bytes]]] = {}
        distant: list[tuple[torch.Tensor, torch.Tensor]] = []
        for spec, tensor in layout:
            if not spec.nbytes or spec.offset in jobs:
                continue
            if isinstance(buffer, DeviceBuffer) or (driver is not None and driver.owns(tensor)):
                distant.append((tensor_in(buffer, spec), tensor))
                end = spec.offset + spec.nbytes
                jobs[spec.offset] = [functools.partial(digest_chunks, buffer.view, spec.offset, end, chunk_bytes)]
            else:
                jobs[spec.offset] = list(_copying(buffer, spec, tensor, chunk_bytes))
        if isinstance(buffer, DeviceBuffer):
            buffer.put(distant)
        elif driver is not None and distant:
            buffer.pin(driver.pin)
            driver.copy(distant)
        digests = iter(_spread([job for found in jobs.values() for job in found], size))
        chunks = {offset: b"".join(next(digests) for _ in found) for offset, found in jobs.items()}
    except BaseException:
        pool.give(buffer)
        raise
    specs = (msgspec.structs.replace(spec, chunks=chunks[spec.offset] if spec.nbytes else b"") for spec, _ in layout)
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


def _copying(buffer: Buffer, spec: TensorSpec, tensor: torch.Tensor, chunk_bytes: int) -> Iterator[Callable[[], bytes]]:
    """The pieces of work that copy one tensor; each returns the digests of its chunks."""
    target = tensor_in(buffer, spec)
    if spec.nbytes <= SLAB_BYTES or not _plain(tensor):

        def all_of_it() -> bytes:
            target.copy_(tensor)
            return digest_chunks(buffer.view, spec.offset, spec.offset + spec.nbytes, chunk_bytes)

        yield all_of_it
        return

    def some(first: int, last: int) -> bytes:
        digests = bytearray()
        for chunk in range(first, last, chunk_bytes):
            digest, end = ChunkDigest(), min(chunk + chunk_bytes, last)
            for at in range(chunk, end, STRIDE_BYTES):  # digested while the processor still has it at hand
                length = min(STRIDE_BYTES, end - at)
                _move(target, tensor, at, length)
                digest.update(buffer.view[spec.offset + at : spec.offset + at + length])
            digests += digest.digest()
        return bytes(digests)

    step = max(1, SLAB_BYTES // chunk_bytes) * chunk_bytes
    for first in range(0, spec.nbytes, step):
        yield functools.partial(some, first, min(first + step, spec.nbytes))


def _plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes lie in our memory one after another and mean what they say."""
    return tensor.is_contiguous() and tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())


def _move(target: torch.Tensor, source: torch.Tensor, start: int, length: int) -> None:
    """Copies some bytes of one contiguous tensor to the same place of another: one thread, without the interpreter's
    lock. (torch's own copy would start threads of its own in each of ours.)"""
    ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, length)


def _spread(jobs: Sequence[Callable[[], T]], size: int) -> list[T]:
    """Does all the jobs, which move `size` bytes, in several threads where that helps; results are in order."""
    import torch

    def one(job: Callable[[], T]) -> T:
        with torch.no_grad():
            return job()

    if size <= SMALL_BYTES or len(jobs) == 1 or WORKERS == 1:
        return [one(job) for job in jobs]
    return list(_workers().map(one, jobs))


@functools.cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WORKERS, "robustrl-copy")


os.register_at_fork(after_in_child=_workers.cache_clear)  # threads do not come along


def digest_chunks(view: Memory, start: int, end: int, chunk_bytes: int) -> bytes:
    """The digests of the chunks between two places of a buffer, one after another."""
    return b"".join(
        chunk_digest(in_host(view[at : min(at + chunk_bytes, end)])) for at in range(start, end, chunk_bytes)
    )


def weights_digest(tensors: Mapping[str, torch.Tensor], chunk_bytes: int) -> str:
    """The digest that these tensors would be published under."""
    return freeze(tensors, chunk_bytes).digest


def load(
    contents: Content | Sequence[Content], target: Mapping[str, torch.Tensor], layout: Layout | None = None
) -> str:
    """Copies a version into live tensors and returns its digest. Checks every tensor before it touches the first.

    Args:
        contents: the version, or its parts in order.
        target: by name.
        layout: which slice of a global tensor the targets of these names are.

    Raises:
        WeightMismatchError: names, a shape or a dtype differ; nothing was changed.
    """
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
                plan.append((ours.detach()[common.within(wanted)], content, spec, common))
        if missing:
            raise WeightMismatchError(
                f"tensor {name!r} was not published whole",
                why=f"the slices leave {missing} of {wanted.count} elements open, or overlap",
            )
    jobs: list[Callable[[], object]] = []
    for ours, content, spec, common in plan:
        theirs = tensor_in(content.buffer, spec)[common.within(box_of(spec))]
        if isinstance(content.buffer, DeviceBuffer):
            jobs.append(functools.partial(content.buffer.put, [(ours, theirs)]))
        else:
            jobs += _loading(ours, theirs)
    _spread(jobs, sum(content.size for content in parts))
    return version_digest([content.digest for content in parts])


def _loading(ours: torch.Tensor, theirs: torch.Tensor) -> Iterator[Callable[[], object]]:
    rows = len(ours) if ours.dim() else 1
    if ours.nbytes <= SLAB_BYTES or rows == 1 or ours.device.type != "cpu":
        yield lambda: ours.copy_(theirs)
        return
    if _plain(ours) and theirs.is_contiguous():
        for at in range(0, ours.nbytes, SLAB_BYTES):
            yield functools.partial(_move, ours, theirs, at, min(SLAB_BYTES, ours.nbytes - at))
        return
    step = max(1, SLAB_BYTES * len(ours) // ours.nbytes)
    for row in range(0, len(ours), step):
        yield functools.partial(ours[row : row + step].copy_, theirs[row : row + step])
