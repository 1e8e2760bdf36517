"""TCP: the transport that is always there. Bytes go from the holder's buffer to the puller's without a copy here."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

from robustrl.errors import ConfigError, PeerGoneError, ProtocolError, TransportError
from robustrl.reconnect.manifest import Range, check_ranges
from robustrl.reconnect.memory import in_host
from robustrl.reconnect.transports.base import IDLE_FACTOR, Conversation, Session, SocketSession, SocketTransport
from robustrl.roles import Identity
from robustrl.wire import Address, Secret, bind

SOCKET_BUFFER = 4 << 20
"""Large enough that a puller whose interpreter is busy for some milliseconds does not stall the stream."""


class _Conversation(Conversation):
    async def answer(self, message: dict[str, Any]) -> None:
        asked = message.get("read")
        if asked is None:
            await super().answer(message)
            return
        content = self.need_content()
        for start, length in check_ranges(read_pairs(asked), content.size, content.present):
            async with asyncio.timeout(self.transport.timeout_s * IDLE_FACTOR):
                await content.until(start + length)
            async with asyncio.timeout(self.transport.timeout_s):
                await self.stream.send_bytes(in_host(content.buffer.view[start : start + length]))
            self.gave(length)


class _Session(SocketSession):
    async def read(self, ranges: Sequence[Range], into: memoryview) -> AsyncIterator[Range]:
        try:
            await self.stream.send({"read": ranges})
            for wanted in ranges:
                await self.stream.read_into(into[wanted.start : wanted.start + wanted.length])
                yield wanted
        except (asyncio.IncompleteReadError, OSError) as error:
            raise PeerGoneError(f"{self.endpoint} ended the connection", why=str(error) or None) from error


class TcpTransport(SocketTransport):
    name = "tcp"
    conversation: type[Conversation] = _Conversation

    def __init__(self, identity: Identity, secret: Secret, *, host: str, timeout_s: float) -> None:
        super().__init__(identity, secret, timeout_s=timeout_s)
        self.host = host

    def bind(self) -> tuple[socket.socket, str]:
        sock = bind(self.host)
        return sock, str(Address(*sock.getsockname()[:2]))

    def dial(self, endpoint: str) -> tuple[socket.socket, Any]:
        try:
            address = Address.parse(endpoint)
        except ConfigError as error:
            raise TransportError(f"{endpoint!r} is no endpoint of {self.name}", why=error.what) from error
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        self.tune(sock)
        return sock, (address.host, address.port)

    async def connect(self, endpoint: str) -> Session:
        return _Session(await self.meet(endpoint), endpoint)

    def tune(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)


def read_pairs(asked: Any) -> list[tuple[int, int]]:
    """Pairs of whole numbers from a message, or ProtocolError."""
    if isinstance(asked, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair) for pair in asked
    ):
        return [(pair[0], pair[1]) for pair in asked]
    raise ProtocolError("ranges were asked for in a form that is not known")
