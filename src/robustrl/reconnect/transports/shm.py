"""Shared memory, for peers on one host: the holder passes the descriptor of its buffer, the puller copies out of it.

The meeting point is a socket in Linux's abstract namespace and the buffer a memfd, so neither has a name in a file
system and nothing is left of them when a process is killed. A holder that dies or freezes after it passed the
descriptor does not matter any more: the kernel keeps the memory for the puller.
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
from robustrl.reconnect.transports.base import Conversation, Session, SocketSession, SocketTransport


@functools.cache
def host_key() -> str:
    """Equal for processes that can meet on an abstract socket: one boot of one kernel, one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


class _Conversation(Conversation):
    async def opened(self, content: Content) -> None:
        # A descriptor opened anew for reading only: a puller cannot change what others read.
        fd = os.open(f"/proc/self/fd/{content.buffer.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            socket.send_fds(self.stream.sock, [b"f"], [fd])
        finally:
            os.close(fd)
        self.transport.served_bytes += content.size


class _Session(SocketSession):
    _fd = -1

    async def open(self, digest: str) -> bytes:
        manifest = await super().open(digest)
        self._release()
        self._fd = await _receive_fd(self.stream.sock)
        return manifest

    async def read(self, ranges: Sequence[Range], into: memoryview) -> AsyncIterator[Range]:
        for wanted in ranges:
            copying = asyncio.create_task(asyncio.to_thread(_copy, self._fd, wanted, into))
            try:
                await asyncio.shield(copying)
            except asyncio.CancelledError:
                await asyncio.wait([copying])  # a copy in memory is short, and `into` must be quiet afterwards
                raise
            yield wanted

    async def close(self) -> None:
        self._release()
        await super().close()

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _copy(fd: int, wanted: Range, into: memoryview) -> None:
    # A read from the memfd copies without the interpreter's lock and without mapping pages.
    done = 0
    while done < wanted.length:
        start = wanted.start + done
        count = os.preadv(fd, [into[start : wanted.start + wanted.length]], start)
        if not count:
            raise TransportError("the shared buffer is shorter than its manifest says")
        done += count


async def _receive_fd(sock: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(sock, 1, 1)
        except BlockingIOError:
            ready = asyncio.Event()
            loop.add_reader(sock.fileno(), ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(sock.fileno())
            continue
        if not data or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise PeerGoneError("the source passed no descriptor")
        os.set_inheritable(fds[0], False)
        return fds[0]


class ShmTransport(SocketTransport):
    name = "shm"
    conversation = _Conversation

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
        return _Session(await self.meet(endpoint), endpoint)
