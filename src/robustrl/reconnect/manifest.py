"""What a weight version consists of: tensors laid out in one flat buffer, cut into chunks, each with a digest.

The version's digest covers names, dtypes, shapes and chunk digests, and nothing else. Equal weights therefore have an
equal digest whatever their version, their order or the way they are tied.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, NamedTuple, Self

import msgspec
import xxhash

from robustrl.errors import ProtocolError, WeightError
from robustrl.wire import frames

ITEM_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
"""The dtypes that can be published, by torch's names, and the bytes of one element."""

ALIGNMENT: Final = 64
DIGEST_BYTES: Final = 16
MAX_TENSORS: Final = 1 << 20
MAX_BYTES: Final = 1 << 44
"""Bytes of one version at the most, as a manifest from a wire may claim them."""

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor: where it lies in the flat buffer and the digests of its chunks, one after another."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    dtype: str
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=16)]
    offset: Size
    chunks: bytes = b""
    whole: Annotated[tuple[Size, ...], msgspec.Meta(max_length=16)] = ()
    """The shape of the global tensor that this is a part of; empty where it is whole."""
    start: Annotated[tuple[Size, ...], msgspec.Meta(max_length=16)] = ()
    """Where in `whole` the part begins."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Piece(NamedTuple):
    """One chunk: a range of the flat buffer that has a digest."""

    start: int
    length: int
    digest: bytes
    tensor: str


class Range(NamedTuple):
    """Bytes of the flat buffer that are asked for at once."""

    start: int
    length: int


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The tensors of a version, sorted by name. Tied tensors share their offset."""

    chunk_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]
    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=MAX_TENSORS)]

    @property
    def size(self) -> int:
        """Bytes of the flat buffer, gaps between tensors included."""
        return max((spec.offset + spec.nbytes for spec in self.tensors), default=0)

    def digest(self) -> str:
        """The version's digest: 32 hexadecimal digits."""
        state = xxhash.xxh3_128(_encoder.encode(self.chunk_bytes))
        for spec in self.tensors:
            part = (spec.whole, spec.start) if spec.whole else ()
            state.update(_encoder.encode((spec.name, spec.dtype, spec.shape, spec.chunks, *part)))
        return str(state.hexdigest())

    def pieces(self) -> list[Piece]:
        """Every chunk once, in the order of the buffer."""
        found: list[Piece] = []
        end = 0
        for spec in sorted(self.tensors, key=lambda spec: spec.offset):
            if spec.offset < end or not spec.nbytes:
                continue  # tied to a tensor before, or empty
            end = spec.offset + spec.nbytes
            for number, start in enumerate(range(spec.offset, end, self.chunk_bytes)):
                digest = spec.chunks[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
                found.append(Piece(start, min(self.chunk_bytes, end - start), digest, spec.name))
        return found

    def encode(self) -> bytes:
        """For the wire. Raises WeightError when it does not fit one frame."""
        data = _encoder.encode(self)
        if len(data) > frames.MAX_FRAME - 1024:
            raise WeightError(
                "the manifest does not fit a frame",
                why=f"{len(self.tensors)} tensors in chunks of {self.chunk_bytes} bytes make {len(data)} bytes",
                do="Raise reconnect.chunk_bytes.",
            )
        return data

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Reads a manifest from a wire. Raises ProtocolError unless it is one that `lay_out` could have made."""
        try:
            manifest = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError("the manifest cannot be read", why=str(error)) from error
        _check(manifest)
        return manifest  # type: ignore[return-value]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


ChunkDigest = xxhash.xxh3_128
"""The digest of one chunk whose bytes come one after another."""


def chunk_digest(data: bytes | memoryview) -> bytes:
    """The digest of one chunk."""
    return bytes(xxhash.xxh3_128_digest(data))


def version_digest(parts: Sequence[str]) -> str:
    """The digest of a version from those of its parts, in order; that of a single part is its own."""
    return parts[0] if len(parts) == 1 else str(xxhash.xxh3_128_hexdigest("/".join(parts).encode()))


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    return -(-nbytes // chunk_bytes)


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _check(manifest: Manifest) -> None:
    def refuse(spec: TensorSpec, why: str) -> ProtocolError:
        return ProtocolError(f"the manifest's tensor {spec.name!r} is wrong", why=why)

    owners: dict[int, TensorSpec] = {}
    free = 0
    last = ""
    for spec in manifest.tensors:
        if spec.dtype not in ITEM_BYTES:
            raise refuse(spec, f"there is no dtype {spec.dtype!r}")
        if spec.name <= last:
            raise refuse(spec, "names are not sorted or not unique")
        last = spec.name
        if len(spec.start) != len(spec.whole) or (
            spec.whole
            and (
                len(spec.shape) != len(spec.whole)
                or any(at + n > all_ for at, n, all_ in zip(spec.start, spec.shape, spec.whole, strict=True))
            )
        ):
            raise refuse(spec, f"{spec.start}+{spec.shape} is no part of {spec.whole}")
        size = spec.nbytes
        if size > MAX_BYTES - free:
            raise refuse(spec, f"more than {MAX_BYTES} bytes in all")
        if len(spec.chunks) != DIGEST_BYTES * chunk_count(size, manifest.chunk_bytes):
            raise refuse(spec, f"{len(spec.chunks)} bytes of chunk digests for {size} bytes")
        if not size:
            if spec.offset:
                raise refuse(spec, "it is empty and has an offset")
        elif (owner := owners.get(spec.offset)) is not None:
            if (owner.dtype, owner.shape, owner.chunks) != (spec.dtype, spec.shape, spec.chunks):
                raise refuse(spec, f"it overlaps {owner.name!r}")
        elif spec.offset != free:
            raise refuse(spec, f"its offset is {spec.offset}, {free} is next")
        else:
            owners[spec.offset] = spec
            free = aligned(free + size)


def plan_ranges(pieces: Iterable[Piece], limit: int) -> list[tuple[Range, list[Piece]]]:
    """Groups chunks that lie beside each other into ranges of at most `limit` bytes (one chunk at the least).

    Few large requests keep the steps in Python per byte low, which a busy interpreter would pay for.
    """
    groups: list[tuple[Range, list[Piece]]] = []
    current: list[Piece] = []

    def close() -> None:
        if current:
            start = current[0].start
            groups.append((Range(start, current[-1].start + current[-1].length - start), list(current)))
            current.clear()

    for piece in sorted(pieces):
        if current:
            end = current[-1].start + current[-1].length
            if piece.start - end >= ALIGNMENT or piece.start + piece.length - current[0].start > limit:
                close()
        current.append(piece)
    close()
    return groups


def cover(pieces: Iterable[Piece]) -> list[Range]:
    """The ranges that chunks lie in, in order; gaps between neighbours that only align them are included."""
    return [wanted for wanted, _ in plan_ranges(pieces, MAX_BYTES)]


def check_ranges(ranges: Sequence[tuple[int, int]], size: int, present: Sequence[Range] | None = None) -> list[Range]:
    """Ranges as a peer asks for them. Raises ProtocolError for one that is not inside the buffer.

    Args:
        ranges: start and length of each.
        size: of the buffer.
        present: the ranges that are there, in order; None where all are.
    """
    checked: list[Range] = []
    for start, length in ranges:
        if start < 0 or length <= 0 or start + length > size:
            raise ProtocolError(f"bytes {start}+{length} were asked for", why=f"the version has {size}")
        if present is not None:
            before = bisect.bisect_right(present, start, key=lambda there: there.start) - 1
            if before < 0 or start + length > present[before].start + present[before].length:
                raise ProtocolError(f"bytes {start}+{length} were asked for", why="this relay holds other parts")
        checked.append(Range(start, length))
    return checked
