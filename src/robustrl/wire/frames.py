"""Frames: a four-byte big-endian length, then that many bytes of msgpack."""

from __future__ import annotations

import asyncio
import struct
from typing import Any, Final, Protocol

import msgspec

from robustrl.errors import PeerGoneError, ProtocolError

MAX_FRAME: Final = 32 << 20
"""Bytes in one frame at the most. Bulk data (weights, snapshots) does not travel in frames."""


class Reader(Protocol):
    """What frames are read from: an `asyncio.StreamReader`, or anything that gives exact counts of bytes."""

    async def readexactly(self, n: int, /) -> bytes: ...


class Writer(Protocol):
    """What frames are written to: an `asyncio.StreamWriter`, or anything alike."""

    def write(self, data: bytes, /) -> None: ...
    async def drain(self) -> None: ...


_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def encode(message: Any) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ProtocolError(
            f"a message of {len(body)} bytes does not fit a frame", why=f"the limit is {MAX_FRAME} bytes"
        )
    return _LENGTH.pack(len(body)) + body


def body_length(header: bytes, limit: int = MAX_FRAME) -> int:
    """The length that a frame's first four bytes announce, refused when it is over `limit`."""
    (length,) = _LENGTH.unpack(header)
    if length > limit:
        raise ProtocolError(f"a frame of {length} bytes was announced", why=f"the limit is {limit} bytes")
    return int(length)


def decode(body: bytes) -> dict[str, Any]:
    try:
        message = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("a frame is not msgpack", why=str(error)) from error
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise ProtocolError("a frame does not hold a message", why=f"it holds a {type(message).__name__}")
    return message


async def read_frame(reader: Reader, limit: int = MAX_FRAME) -> dict[str, Any]:
    """The next message. Raises PeerGoneError at the end of the stream and ProtocolError for anything else."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        return decode(await reader.readexactly(body_length(header, limit)))
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, OSError) as error:
        raise PeerGoneError("the connection ended", why=str(error) or type(error).__name__) from error
