"""UCX through ucxx, the only module that imports it.

A TCP connection carries the handshake and the requests; UCX carries the bytes. ucxx's listeners take connections on
every interface and know no secret, so the holder opens one only when a puller that has proved the secret wants to
connect, takes only connections that show a one-time token, and closes it when nobody is on the way any more.

What was learned about ucxx, and holds here:

* Progress runs in ucxx's own thread without the interpreter's lock. Completions are looked at, not called back:
  Python futures need a second thread that hangs at exit, and their exceptions pin buffers.
* Cancelling a receive does not stop the sender's writes; closing the endpoint does. So an endpoint is closed before a
  buffer is given back, and a buffer whose request does not even end then is kept for good (`_Engine.stuck`).
* A listener that is destroyed while a connection arrives takes the process with it.
* A stopped peer is never noticed by UCX: all waits have limits.
* The environment is read when ucxx is imported. Error handling is what makes a peer's death an error, and shared
  memory transports do not have it: tcp, and rc and cuda where they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from robustrl.errors import MissingDependencyError, PeerGoneError, ProtocolError, TransportError
from robustrl.reconnect.manifest import Range, check_ranges
from robustrl.reconnect.transports.base import IDLE_FACTOR, Conversation, Session, SocketSession, SocketStream
from robustrl.reconnect.transports.tcp import TcpTransport, read_pairs
from robustrl.roles import Identity
from robustrl.wire import Address, Secret, frames

if TYPE_CHECKING:
    from robustrl.reconnect.memory import Memory

TOKEN_BYTES: Final = 16
MAX_CREDITS: Final = 64
"""Ranges under way to one puller, whatever it asks for."""


def set_environment(host: str) -> None:
    """Says to UCX, which reads it once, what the module's text says. What the user has set stays."""
    defaults = {
        "UCX_TLS": "tcp,self,rc,cuda_copy",
        "UCX_RNDV_SCHEME": "put_zcopy",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "UCX_LOG_FILE": "stderr",
        "UCX_LOG_LEVEL": "fatal",
    }
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            defaults["UCX_NET_DEVICES"] = "lo"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


class _Engine:
    """ucxx's context, worker and progress thread: one a process, for as long as a transport uses it."""

    _one: _Engine | None = None
    _users = 0

    def __init__(self, host: str) -> None:
        set_environment(host)
        try:
            import ucxx  # noqa: F401  (loads the libraries and sets defaults)
            from ucxx._lib import arr, libucxx
            from ucxx.types import Tag, TagMaskFull
        except ImportError as error:
            raise MissingDependencyError(
                "the transport ucx cannot be loaded", why=str(error), do="Install robustrl[ucx]."
            ) from error
        self.api = libucxx
        self._array = arr.Array
        self._tag = Tag
        self._full_mask = TagMaskFull
        self._context = libucxx.UCXContext({})
        self.worker = libucxx.UCXWorker(self._context, enable_delayed_submission=True, enable_python_future=False)
        self.worker.start_progress_thread(polling_mode=False, epoll_timeout=1)
        self.stuck: list[tuple[Any, Memory]] = []

    @classmethod
    def acquire(cls, host: str) -> _Engine:
        if cls._one is None:
            cls._one = cls(host)
        cls._users += 1
        return cls._one

    @classmethod
    def release(cls) -> None:
        cls._users -= 1
        if cls._users == 0 and cls._one is not None:
            cls._one.worker.stop_progress_thread()
            cls._one = None

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turns ucxx's errors into ours, without the traceback that would pin the buffers."""
        try:
            yield
        except self.api.UCXError as error:
            raise PeerGoneError("the UCX connection ended", why=f"{type(error).__name__}: {error}") from None

    def listen(self, arrived: Callable[[Any], None]) -> Any:
        return self.api.UCXListener.create(worker=self.worker, port=0, cb_func=arrived, deliver_endpoint=True)

    def connect(self, host: str, port: int) -> Any:
        with self.errors():
            return self.api.UCXEndpoint.create(self.worker, host, port, True)

    def send(self, endpoint: Any, view: Memory, tag: int) -> Any:
        with self.errors():
            return endpoint.tag_send(self._array(_exposed(view)), self._tag(tag))

    def receive(self, endpoint: Any, view: Memory, tag: int) -> Any:
        with self.errors():
            return endpoint.tag_recv(self._array(_exposed(view)), self._tag(tag), self._full_mask)

    def send_token(self, endpoint: Any, token: bytes) -> Any:
        with self.errors():
            return endpoint.stream_send(self._array(token))

    def receive_token(self, endpoint: Any, into: bytearray) -> Any:
        with self.errors():
            return endpoint.stream_recv(self._array(into))

    async def finish(self, request: Any) -> None:
        """Waits for a request. The caller sets the limit. Raises PeerGoneError when it failed."""
        pause = 0.0002
        while not request.completed:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.002)
        with self.errors():
            request.check_error()

    def end(self, endpoint: Any, pending: Sequence[tuple[Any, Memory]]) -> bool:
        """Closes an endpoint and sees to it that nothing touches the buffers of `pending` any more.

        Returns False when it could not: the buffers are kept, and must not be used for anything else.

        With a peer that is stopped this takes up to a second, in which the loop serves nobody. It is not done in a
        thread: when two endpoints of one worker were closed at once, UCX was seen to take 10 s and to keep the port.
        """
        with contextlib.suppress(Exception):
            endpoint.close_blocking(period=10**9, max_attempts=1)
            endpoint.remove_close_callback()
        limit = time.monotonic() + 0.25
        for request, view in pending:
            while not request.completed and time.monotonic() < limit:
                time.sleep(0.001)
            if not request.completed:
                self.stuck.append((request, view))
        clean = all(request.completed for request, _ in pending)
        self.stuck = [entry for entry in self.stuck if not entry[0].completed]
        return clean


def _exposed(view: Memory) -> Any:
    """What ucxx can take: bytes of the host, or a device's with a CUDA array interface (torch's tensors there)."""
    return view if isinstance(view, memoryview) or view.is_cuda else view.numpy()


class _Door:
    """The UCX listener of a holder: open while pullers are on their way to it, and for some time after.

    It is not closed at once, because UCX destroys a listener under the hands of a connection that arrives at that
    moment, and the process with it: it closes when nobody can be on the way any more.
    """

    def __init__(self, engine: _Engine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._listener: Any = None
        self._expected: dict[bytes, asyncio.Future[Any]] = {}
        self._greetings: set[asyncio.Task[None]] = set()
        self._closing: asyncio.TimerHandle | None = None

    async def admit(self, say: Callable[[dict[str, Any]], Awaitable[None]]) -> Any:
        """Tells a puller where to connect and what to show, and returns its endpoint. The caller sets the limit."""
        token = secrets.token_bytes(TOKEN_BYTES)
        arrival = self._expected[token] = self._loop.create_future()
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        try:
            if self._listener is None:
                self._listener = self._engine.listen(self._arrived)
            await say({"port": self._listener.port, "token": token})
            return await arrival
        finally:
            del self._expected[token]
            if not self._expected:
                self._closing = self._loop.call_later(IDLE_FACTOR * self._timeout_s, self._shut)

    def _arrived(self, endpoint: Any) -> None:
        """Called in ucxx's thread."""
        self._loop.call_soon_threadsafe(self._begin, endpoint)

    def _begin(self, endpoint: Any) -> None:
        task = self._loop.create_task(self._greet(endpoint))
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    async def _greet(self, endpoint: Any) -> None:
        shown = bytearray(TOKEN_BYTES)
        welcome = False
        try:
            await asyncio.wait_for(self._engine.finish(self._engine.receive_token(endpoint, shown)), self._timeout_s)
            arrival = self._expected.get(bytes(shown))
            if arrival is not None and not arrival.done():
                arrival.set_result(endpoint)
                welcome = True
        except (PeerGoneError, TimeoutError):
            pass
        finally:
            if not welcome:
                self._engine.end(endpoint, [])

    def _shut(self) -> None:
        self._listener = None
        self._closing = None

    async def close(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        self._shut()
        for task in self._greetings:
            task.cancel()
        await asyncio.gather(*self._greetings, return_exceptions=True)


class _Conversation(Conversation):
    transport: UcxTransport

    def __init__(self, transport: UcxTransport, stream: SocketStream) -> None:
        super().__init__(transport, stream)
        self._endpoint: Any = None
        self._pending: deque[tuple[Any, Memory]] = deque()

    async def answer(self, message: dict[str, Any]) -> None:
        if message.get("ucx") == "connect":
            async with asyncio.timeout(self.transport.timeout_s):
                await self._connect()
        elif "put" in message:
            await self._put(message)
        else:
            while self._pending:  # what was asked of the content before may still be on its way out of its buffer
                await self._reap()
            await super().answer(message)

    async def _connect(self) -> None:
        if self._endpoint is not None:
            raise ProtocolError("a puller connected twice")
        self._endpoint = await self.transport.door.admit(self.stream.send)

    async def _put(self, message: dict[str, Any]) -> None:
        content, tag = self.need_content(), message.get("tag")
        [(start, length)] = check_ranges(read_pairs([message["put"]]), content.size, content.present)
        if self._endpoint is None or type(tag) is not int or not 0 <= tag < 1 << 64:
            raise ProtocolError("a puller asked for bytes without a connection or a tag")
        while self._pending and (self._pending[0][0].completed or len(self._pending) >= MAX_CREDITS):
            await self._reap()
        async with asyncio.timeout(self.transport.timeout_s * IDLE_FACTOR):
            await content.until(start + length)
        view = content.buffer.view[start : start + length]
        self._pending.append((self.transport.engine.send(self._endpoint, view, tag), view))

    async def _reap(self) -> None:
        request, view = self._pending[0]
        async with asyncio.timeout(self.transport.timeout_s):
            await self.transport.engine.finish(request)
        self._pending.popleft()
        self.gave(len(view))

    async def close(self) -> None:
        if self._endpoint is not None:
            for request, view in self._pending:
                if request.completed:
                    self.gave(len(view))
            self.transport.engine.end(self._endpoint, self._pending)
            self._endpoint = None
            self._pending.clear()


class _Session(SocketSession):
    def __init__(self, stream: SocketStream, endpoint: str, engine: _Engine, credits: int) -> None:
        super().__init__(stream, endpoint)
        self._credits = credits
        self._engine = engine
        self._endpoint: Any = None
        self._pending: deque[tuple[Any, Memory]] = deque()
        self._next_tag = secrets.randbits(63)

    async def connect(self, host: str) -> None:
        await self.stream.send({"ucx": "connect"})
        answer = await frames.read_frame(self.stream, frames.MAX_FRAME)
        port, token = answer.get("port"), answer.get("token")
        if type(port) is not int or not 0 < port < 65536 or not isinstance(token, bytes) or len(token) != TOKEN_BYTES:
            raise ProtocolError(f"{self.endpoint} did not say where its UCX listens")
        self._endpoint = self._engine.connect(host, port)
        await self._engine.finish(self._engine.send_token(self._endpoint, token))

    async def read(self, ranges: Sequence[Range], into: Memory) -> AsyncIterator[Range]:
        waiting: deque[Range] = deque()
        left = deque(ranges)
        while waiting or left:
            while left and len(waiting) < self._credits:
                wanted = left.popleft()
                await self._ask(wanted, into)
                waiting.append(wanted)
            await self._engine.finish(self._pending[0][0])
            self._pending.popleft()
            yield waiting.popleft()

    async def _ask(self, wanted: Range, into: Memory) -> None:
        tag = self._next_tag
        self._next_tag += 1
        view = into[wanted.start : wanted.start + wanted.length]
        try:
            self._pending.append((self._engine.receive(self._endpoint, view, tag), view))
            await self.stream.send({"put": wanted, "tag": tag})
        except OSError as error:
            raise PeerGoneError(f"{self.endpoint} ended the connection", why=str(error) or None) from None

    async def close(self) -> None:
        if self._endpoint is not None:
            self.tainted = not self._engine.end(self._endpoint, self._pending)
            self._pending.clear()
            self._endpoint = None
        await super().close()


class UcxTransport(TcpTransport):
    """UCX's bytes beside a TCP connection. ucxx is loaded at the first connection, by either side."""

    name = "ucx"
    conversation = _Conversation

    def __init__(self, identity: Identity, secret: Secret, *, host: str, timeout_s: float, credits: int = 4) -> None:
        super().__init__(identity, secret, host=host, timeout_s=timeout_s)
        self.credits = credits
        self._engine: _Engine | None = None
        self._door: _Door | None = None

    @property
    def door(self) -> _Door:
        if self._door is None:
            self._door = _Door(self.engine, self.timeout_s)
        return self._door

    @property
    def engine(self) -> _Engine:
        if self._engine is None:
            self._engine = _Engine.acquire(self.host)
        return self._engine

    async def connect(self, endpoint: str) -> Session:
        engine = self.engine
        session = _Session(await self.meet(endpoint), endpoint, engine, self.credits)
        try:
            async with asyncio.timeout(self.timeout_s):
                await session.connect(Address.parse(endpoint).host)
        except PeerGoneError as error:
            await session.close()
            raise TransportError(f"cannot connect to {endpoint} over ucx", why=str(error)) from error
        except BaseException:
            await session.close()
            raise
        return session

    async def close(self) -> None:
        await super().close()
        if self._door is not None:
            await self._door.close()
            self._door = None
        if self._engine is not None:
            self._engine = None
            _Engine.release()
