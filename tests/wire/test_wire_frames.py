"""Frames: whatever comes in, only the wire's own errors come out, and memory is taken only for what is allowed."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robustrl.errors import PeerGoneError, ProtocolError
from robustrl.wire import frames

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
messages = st.dictionaries(st.text(), values, max_size=5)


class Bytes:
    """A reader over given bytes that notes the largest read that was asked for."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.largest = 0

    async def readexactly(self, n: int, /) -> bytes:
        self.largest = max(self.largest, n)
        if n > len(self._data):
            raise asyncio.IncompleteReadError(self._data, n)
        taken, self._data = self._data[:n], self._data[n:]
        return taken


def read_all(data: bytes, limit: int = frames.MAX_FRAME) -> list[dict[str, Any]]:
    async def read() -> list[dict[str, Any]]:
        reader, found = Bytes(data), []
        while reader._data:
            found.append(await frames.read_frame(reader, limit))
        return found

    return asyncio.run(read())


@given(st.lists(messages, max_size=4))
def test_messages_come_out_as_they_went_in(sent: list[dict[str, Any]]) -> None:
    assert read_all(b"".join(frames.encode(message) for message in sent)) == sent


@given(st.binary(max_size=400))
def test_random_bytes_raise_only_errors_of_the_wire(data: bytes) -> None:
    with contextlib.suppress(ProtocolError, PeerGoneError):
        read_all(data)


@given(st.binary(max_size=400))
def test_a_random_body_is_a_message_or_a_protocol_error(body: bytes) -> None:
    try:
        message = frames.decode(body)
    except ProtocolError:
        return
    assert all(isinstance(key, str) for key in message)


@given(messages, st.data())
def test_a_damaged_frame_raises_only_errors_of_the_wire(message: dict[str, Any], data: st.DataObject) -> None:
    whole = bytearray(frames.encode(message))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError, PeerGoneError):
        read_all(bytes(whole[: data.draw(st.integers(1, len(whole)))]))


@given(st.integers(0, 2**32 - 1), st.integers(0, frames.MAX_FRAME))
def test_a_length_over_the_limit_is_refused_before_anything_is_read(length: int, limit: int) -> None:
    reader = Bytes(struct.pack(">I", length) + b"x" * 8)
    with pytest.raises((ProtocolError, PeerGoneError)) as caught:
        asyncio.run(frames.read_frame(reader, limit))
    if length > limit:
        assert reader.largest == 4
        assert caught.type is ProtocolError
        assert str(length) in str(caught.value)
        assert str(limit) in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x81\x80\x01",  # a map with a map as its key
        b"\x81\x01\x01",  # a map with a number as its key
        b"\x91" * 5000,  # nested deeper than any message
        b"\x81" * 5000,
        b"\xc7\x0c\xff" + b"\xff" * 12,  # a timestamp out of range
        b"\xc1",
        b"\x90",
        b"\xdf\xff\xff\xff\xff",  # a map that announces four thousand million entries
        b"\xc6\xff\xff\xff\xff",
    ],
)
def test_nasty_bodies_are_protocol_errors(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        frames.decode(body)


def test_a_message_over_the_limit_is_refused_by_the_sender() -> None:
    with pytest.raises(ProtocolError, match="does not fit a frame"):
        frames.encode({"data": bytes(frames.MAX_FRAME + 1)})


def test_the_end_of_the_stream_is_told_from_a_wrong_frame() -> None:
    with pytest.raises(PeerGoneError):
        read_all(frames.encode({"a": 1})[:-1])
