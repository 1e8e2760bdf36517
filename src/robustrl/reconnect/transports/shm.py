"""Shared memory, for peers on one host: the holder passes the descriptor of its buffer, the puller maps it. No copy.

The meeting point is a socket in Linux's abstract namespace and the buffer a memfd, so neither has a name in a file
system and nothing is left of them when a process is killed. A holder that dies or freezes after it passed the
descriptor does not matter any more: the kernel keeps the memory for the puller. The holder writes the next version
elsewhere for as long as someone may read this one (`robustrl.reconnect.memory`).
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from robustrl.errors import PeerGoneError, TransportError
from robustrl.reconnect.content import Content
from robustrl.reconnect.manifest import Range
from robustrl.reconnect.memory import DeviceBuffer, Mapped, Mappings, Shared
from robustrl.reconnect.transports.base import Conversation, Session, SocketSession, SocketStream, SocketTransport
from robustrl.roles import Identity
from robustrl.wire import Secret


@functools.cache
def host_key() -> str:
    """Equal for processes that can meet on an abstract socket: one boot of one kernel, one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


class _Conversation(Conversation):
    async def opened(self, content: Content) -> None:
        assert not isinstance(content.buffer, DeviceBuffer)  # `RobustConfig.check` sees to it
        shared = content.buffer.share()
        try:
            socket.send_fds(self.stream.sock, [b"f"], list(shared))
        finally:
            shared.close()
        self.gave(content.size)


class _Session(SocketSession):
    def __init__(self, stream: SocketStream, endpoint: str, mappings: Mappings) -> None:
        super().__init__(stream, endpoint)
        self._mappings = mappings
        self._shared: Shared | None = None

    async def open(self, digest: str) -> bytes:
        manifest = await super().open(digest)
        self._release()
        self._shared = await _receive(self.stream.sock)
        return manifest

    def lend(self, size: int) -> Mapped:
        assert self._shared is not None
        shared, self._shared = self._shared, None
        return self._mappings.map(shared, size)

    async def read(self, ranges: Sequence[Range], into: memoryview) -> AsyncIterator[Range]:
        mapped = self.lend(max((wanted.start + wanted.length for wanted in ranges), default=0))
        for wanted in ranges:
            there = slice(wanted.start, wanted.start + wanted.length)
            into[there] = mapped.view[there]
            yield wanted
        mapped.close()

    async def close(self) -> None:
        self._release()
        await super().close()

    def _release(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None


async def _receive(sock: socket.socket) -> Shared:
    loop = asyncio.get_running_loop()
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(sock, 1, 2)
        except BlockingIOError:
            ready = asyncio.Event()
            loop.add_reader(sock.fileno(), ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(sock.fileno())
            continue
        if not data or len(fds) != 2:
            for fd in fds:
                os.close(fd)
            raise PeerGoneError("the source passed no descriptors")
        for fd in fds:
            os.set_inheritable(fd, False)
        return Shared(*fds)


class ShmTransport(SocketTransport):
    """See the module. `keep` mappings of peers' memory stay for the versions to come."""

    name = "shm"
    relays_early = False  # a reader would have to be told how far it may read; mapping takes no time anyway
    conversation = _Conversation

    def __init__(self, identity: Identity, secret: Secret, *, timeout_s: float, keep: int = 3) -> None:
        super().__init__(identity, secret, timeout_s=timeout_s)
        self._mappings = Mappings(keep)

    @property
    def mapped_bytes(self) -> int:
        return self._mappings.bytes

    def bind(self) -> tuple[socket.socket, str]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"robustrl-{self.identity.member.role}-{os.getpid()}-{secrets.token_hex(8)}"
        sock.bind("\0" + name)
        sock.listen(128)
        sock.setblocking(False)
        return sock, f"{host_key()}/{name}"

    def dial(self, endpoint: str) -> tuple[socket.socket, Any]:
        host, _, name = endpoint.rpartition("/")
        if host != host_key() or not name or len(name) > 100:
            raise TransportError(f"{endpoint!r} is not on this host")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        return sock, "\0" + name

    async def connect(self, endpoint: str) -> Session:
        return _Session(await self.meet(endpoint), endpoint, self._mappings)

    async def close(self) -> None:
        await super().close()
        self._mappings.clear()
