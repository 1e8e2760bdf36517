"""The interface of a transport, and what those share that talk over a socket first.

A puller connects to a holder's endpoint, proves the job's secret, opens a content by its digest and reads ranges of
it. Each connection serves one request after another; there is no group, and a connection's end concerns its two peers.

Messages after the handshake (frames of `robustrl.wire`):

    {"open": DIGEST}             -> {"manifest": BYTES} or {"error": WHAT}; shm: and the buffer's descriptor
    {"read": [[start, length]]}  -> tcp: the bytes of the ranges, in this order
    {"put": [start, length], "tag": N}  -> ucx: the bytes under this tag, on the UCX endpoint
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from robustrl.errors import PeerGoneError, ProtocolError, RobustError, TransportError
from robustrl.reconnect.arrival import ContentGoneError
from robustrl.reconnect.content import Content
from robustrl.reconnect.manifest import Range
from robustrl.reconnect.memory import Mapped
from robustrl.roles import Identity
from robustrl.wire import Secret, frames, handshake

log = logging.getLogger("robustrl.reconnect")

Source = Callable[[str], "Content | None"]
"""What a holder serves: the content of a digest, or None when it is not (or no longer) there."""

IDLE_FACTOR = 6.0
"""A puller that asks for nothing for this many timeouts is let go."""


class Session(Protocol):
    """One connection to one source, on the puller's side. Used by one task."""

    async def open(self, digest: str) -> bytes:
        """Pins a content at the source and returns its encoded manifest. Raises ContentGoneError when it is gone."""
        ...

    def lend(self, size: int) -> Mapped | None:
        """The `size` bytes of the opened content where they lie, unverified; None where only `read` leads to them.

        Raises TransportError when the source's memory cannot be trusted to stay.
        """
        ...

    def read(self, ranges: Sequence[Range], into: memoryview) -> AsyncIterator[Range]:
        """Reads ranges of the opened content to the same places of `into`; yields each when it has landed.

        The caller limits the time to each range. Bytes are not verified here.
        """
        ...

    async def close(self) -> None:
        """Ends the connection, whatever its state. Nothing is written to `into` once this has returned, but for the
        rare case that `tainted` tells of."""
        ...

    @property
    def tainted(self) -> bool:
        """Whether something may still be written to `into` after `close`: it must not be used for another content."""
        ...


class Transport(ABC):
    """One way for bytes. `served_bytes` counts what pullers were given."""

    name: str
    relays_early: bool = True
    """Whether it serves a content that is still arriving, each range as soon as it is there."""
    served_bytes: int = 0

    @property
    def mapped_bytes(self) -> int:
        """Bytes of peers' memory that are mapped here."""
        return 0

    @abstractmethod
    async def serve(self, source: Source) -> str:
        """Begins to serve contents and returns the endpoint that `connect` takes."""

    @abstractmethod
    async def connect(self, endpoint: str) -> Session:
        """Connects to a holder.

        Raises:
            TransportError: nobody is there; another transport may lead to it.
            TimeoutError: it accepts and does not answer.
            HandshakeRefusedError, FencedError: it does not want us.
        """

    @abstractmethod
    async def close(self) -> None:
        """Serves no more; ends every connection that others opened."""


class SocketStream:
    """Exact reads and buffered writes on a non-blocking socket, straight from and to the caller's memory."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._out = bytearray()

    async def readexactly(self, n: int, /) -> bytes:
        await self.drain()  # whoever waits for an answer has asked; not everyone who writes drains
        data = bytearray(n)
        await self.read_into(memoryview(data))
        return bytes(data)

    async def read_into(self, view: memoryview) -> None:
        """Fills `view`. Raises IncompleteReadError at the end of the stream."""
        done, size = 0, len(view)
        while done < size:
            count = await self._loop.sock_recv_into(self.sock, view[done:])
            if not count:
                raise asyncio.IncompleteReadError(b"", size - done)
            done += count

    def write(self, data: bytes, /) -> None:
        self._out += data

    async def drain(self) -> None:
        data, self._out = self._out, bytearray()
        if data:
            await self._loop.sock_sendall(self.sock, data)

    async def send(self, message: dict[str, Any]) -> None:
        self.write(frames.encode(message))
        await self.drain()

    async def send_bytes(self, view: memoryview) -> None:
        await self._loop.sock_sendall(self.sock, view)

    def close(self) -> None:
        self.sock.close()


class Conversation:
    """The source's side of one connection. Subclasses give the bytes."""

    def __init__(self, transport: SocketTransport, stream: SocketStream) -> None:
        self.transport = transport
        self.stream = stream
        self.content: Content | None = None
        self.given = 0
        """Bytes that this puller was given."""

    def gave(self, count: int) -> None:
        self.given += count
        self.transport.served_bytes += count

    async def answer(self, message: dict[str, Any]) -> None:
        digest = message.get("open")
        if not isinstance(digest, str):
            raise ProtocolError("a puller asked for something that this transport does not know")
        content = self.transport.source(digest)
        if content is not None and not content.arrived and not self.transport.relays_early:
            content = None
        self.content = content
        if content is None:
            await self.stream.send({"error": f"content {digest} is not here"})
            return
        await self.stream.send({"manifest": content.encoded})
        await self.opened(content)

    async def opened(self, content: Content) -> None:
        """Called after the manifest went out."""

    def need_content(self) -> Content:
        if self.content is None:
            raise ProtocolError("a puller read before it opened a content")
        return self.content

    async def close(self) -> None:
        """Called once at the connection's end, whatever its reason."""


class SocketSession:
    """The puller's side of one connection: a socket, after the handshake."""

    def __init__(self, stream: SocketStream, endpoint: str) -> None:
        self.stream = stream
        self.endpoint = endpoint
        self.tainted = False

    def lend(self, size: int) -> Mapped | None:
        return None

    async def open(self, digest: str) -> bytes:
        await self.stream.send({"open": digest})
        answer = await frames.read_frame(self.stream)
        manifest = answer.get("manifest")
        if not isinstance(manifest, bytes):
            raise ContentGoneError(f"{self.endpoint} cannot serve", why=str(answer.get("error", "it does not say why")))
        return manifest

    async def close(self) -> None:
        self.stream.close()


class SocketTransport(Transport):
    """A transport whose peers meet on a stream socket.

    Args:
        identity: who we are, said in the handshake.
        secret: the job's secret.
        timeout_s: the limit of one range to or from one peer.
    """

    conversation: type[Conversation]

    def __init__(self, identity: Identity, secret: Secret, *, timeout_s: float) -> None:
        self.identity = identity
        self.secret = secret
        self.timeout_s = timeout_s
        self.source: Source = lambda digest: None
        self._sock: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def bind(self) -> tuple[socket.socket, str]:
        """A listening, non-blocking socket, and the endpoint that leads to it."""

    @abstractmethod
    def dial(self, endpoint: str) -> tuple[socket.socket, Any]:
        """A fresh non-blocking socket and the address to connect it to. Raises TransportError for nonsense."""

    async def serve(self, source: Source) -> str:
        self.source = source
        self._sock, endpoint = self.bind()
        self._spawn(self._accept(self._sock))
        return endpoint

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    async def meet(self, endpoint: str) -> SocketStream:
        """Connects and shakes hands."""
        sock, address = self.dial(endpoint)
        stream = SocketStream(sock)
        try:
            async with asyncio.timeout(self.timeout_s):
                await asyncio.get_running_loop().sock_connect(sock, address)
                await handshake.offer(stream, stream, self.secret, self.identity)
        except TimeoutError:
            stream.close()
            raise
        except (PeerGoneError, OSError) as error:
            stream.close()
            raise TransportError(f"cannot connect to {endpoint} over {self.name}", why=str(error)) from error
        except BaseException:
            stream.close()
            raise
        return stream

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(sock)
            except OSError as error:
                log.warning("%s: accepting failed: %s", self.identity, error)
                await asyncio.sleep(0.1)  # out of descriptors, most likely: others may give some back
                continue
            peer.setblocking(False)
            self.tune(peer)
            self._spawn(self._converse(SocketStream(peer)))

    async def _converse(self, stream: SocketStream) -> None:
        talk: Conversation | None = None
        peer, where = "a stranger", "its hello"
        try:
            async with asyncio.timeout(self.timeout_s):
                peer = str(await handshake.accept(stream, stream, self.secret))
            talk = self.conversation(self, stream)
            while True:
                async with asyncio.timeout(self.timeout_s * IDLE_FACTOR):
                    message = await frames.read_frame(stream)
                await talk.answer(message)
        except PeerGoneError:
            pass
        except (RobustError, OSError) as error:
            if talk is not None:
                where = f"{talk.given} bytes"
            why = str(error) or "nothing moved within the limit"
            log.warning(
                "%s in phase sync let %s go, who pulled over %s, after %s: %s",
                self.identity,
                peer,
                self.name,
                where,
                why,
            )
        finally:
            try:
                if talk is not None:
                    await talk.close()
            finally:
                stream.close()

    def tune(self, sock: socket.socket) -> None:
        """Sets options of a socket that is about to carry bytes."""
