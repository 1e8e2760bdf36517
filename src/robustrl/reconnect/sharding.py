"""Who holds and who needs which part of a tensor: boxes, their intersections, and the chunks that contain them. Pure.

A chunk is the least that can be verified, so a receiver pulls every chunk that contains a byte it needs. Row shards of
row shards cost nothing beyond that; a column shard of a matrix whose rows are shorter than a chunk costs the whole of
it. A publisher that knows its receivers can cut chunks smaller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Self

import msgspec
import xxhash

from robustrl.errors import WeightError
from robustrl.reconnect.manifest import ITEM_BYTES, Manifest, Piece, TensorSpec


class Slice(msgspec.Struct, frozen=True):
    """A box of a global tensor: where it begins and how large it is, for each dimension of `whole`.

    Raises WeightError when it does not lie within.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.whole) == len(self.start) == len(self.size) or not all(
            min(start, size) >= 0 and start + size <= whole
            for whole, start, size in zip(self.whole, self.start, self.size, strict=True)
        ):
            raise WeightError(f"{list(self.start)}+{list(self.size)} is no slice of a tensor {list(self.whole)}")

    @classmethod
    def all(cls, whole: tuple[int, ...]) -> Self:
        return cls(whole, (0,) * len(whole), whole)

    @classmethod
    def split(cls, whole: tuple[int, ...], dim: int, index: int, count: int) -> Self:
        """Part `index` of `count` along one dimension, as `torch.chunk` cuts it; the last may be smaller or empty."""
        step = -(-whole[dim] // count)
        begin = min(index * step, whole[dim])
        end = min(begin + step, whole[dim])
        start, size = [0] * len(whole), list(whole)
        start[dim], size[dim] = begin, end - begin
        return cls(whole, tuple(start), tuple(size))

    def meet(self, other: Slice) -> Slice | None:
        """What both have in common, or None."""
        start = tuple(map(max, self.start, other.start))
        size = tuple(
            min(a + n, b + m) - at
            for a, n, b, m, at in zip(self.start, self.size, other.start, other.size, start, strict=True)
        )
        return Slice(self.whole, start, size) if all(length > 0 for length in size) else None

    def within(self, outer: Slice) -> tuple[slice, ...]:
        """The index of this box in a tensor that holds `outer`."""
        return tuple(
            slice(at - base, at - base + length)
            for at, base, length in zip(self.start, outer.start, self.size, strict=True)
        )

    @property
    def count(self) -> int:
        return math.prod(self.size)


Layout = Mapping[str, Slice]
"""What a receiver needs of each tensor, by name; what is not named it needs whole."""


def layout_key(layout: Layout | None) -> str:
    """Equal for receivers that need the same: they can be each other's relays. Empty for whoever needs all."""
    if not layout:
        return ""
    return str(xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(sorted(layout.items()))))


def box_of(spec: TensorSpec) -> Slice:
    """Where a published tensor lies in the global one."""
    return Slice(spec.whole, spec.start, spec.shape) if spec.whole else Slice.all(spec.shape)


def needed(manifest: Manifest, layout: Layout | None) -> list[Piece]:
    """The chunks that contain what `layout` asks for, in the order of the buffer.

    Raises WeightError when the layout speaks of another global shape.
    """
    pieces = manifest.pieces()
    if not layout:
        return pieces
    wanted: dict[int, list[tuple[int, int]]] = {}
    for spec in manifest.tensors:
        if spec.nbytes:
            wanted.setdefault(spec.offset, []).extend(_spans(spec, layout.get(spec.name), manifest.chunk_bytes))
    spans = sorted(span for found in wanted.values() for span in found)
    chosen: list[Piece] = []
    at = 0
    for piece in pieces:
        while at < len(spans) and spans[at][1] <= piece.start:
            at += 1
        # Spans of tied tensors may overlap: one that ends later may follow one that ends earlier.
        here = at
        while here < len(spans) and spans[here][0] < piece.start + piece.length:
            if spans[here][1] > piece.start:
                chosen.append(piece)
                break
            here += 1
    return chosen


def _spans(spec: TensorSpec, wanted: Slice | None, chunk_bytes: int) -> list[tuple[int, int]]:
    """Byte ranges of the buffer that contain `wanted` of one tensor, none finer than what chunks can tell apart."""
    if wanted is None:
        return [(spec.offset, spec.offset + spec.nbytes)]
    box = box_of(spec)
    if box.whole != wanted.whole:
        raise WeightError(
            f"tensor {spec.name!r} is cut from another shape",
            why=f"published is a part of {list(box.whole)}, the receiver needs one of {list(wanted.whole)}",
        )
    common = box.meet(wanted)
    if common is None:
        return []
    strides = [ITEM_BYTES[spec.dtype]]
    for length in reversed(spec.shape[1:]):
        strides.insert(0, strides[0] * length)
    first = [index.start for index in common.within(box)]
    starts = [spec.offset]
    for dim, stride in enumerate(strides[: len(first)]):
        if stride < chunk_bytes:  # from here on one span from the first byte to the last
            rest = range(dim, len(first))
            begin = sum(first[at] * strides[at] for at in rest)
            end = sum((first[at] + common.size[at] - 1) * strides[at] for at in rest) + strides[-1]
            return [(start + begin, start + end) for start in starts]
        starts = [start + (first[dim] + row) * stride for start in starts for row in range(common.size[dim])]
    return [(start, start + strides[-1]) for start in starts]
