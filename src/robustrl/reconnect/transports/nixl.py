"""NIXL, the only module that imports it: the puller reads the holder's memory, one-sided.

Its wheel carries a UCX with verbs, which ucxx's wheels lack: the transport for RDMA clusters. A TCP connection carries
the handshake and what the puller says it reads; NIXL's agents never meet anyone who has not proved the secret, because
the agent's metadata, without which nothing can be read, travels only over that connection.

* The holder's process does nothing while its memory is read. It hears from the puller which ranges and says when they
  are there (a relay may still be getting them); the puller verifies what it read against the digests, so a range that
  changed is found.
* A holder that stops is never noticed by NIXL: all waits have limits.
* A read that cannot be cancelled leaves its target tainted (`Session.tainted`), and its handle is kept (`stuck`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import secrets
import weakref
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final

from robustrl.errors import MissingDependencyError, PeerGoneError, ProtocolError, TransportError
from robustrl.reconnect.content import Content
from robustrl.reconnect.manifest import Range, check_ranges
from robustrl.reconnect.memory import DeviceBuffer
from robustrl.reconnect.transports.base import IDLE_FACTOR, Conversation, Session, SocketSession, SocketStream
from robustrl.reconnect.transports.tcp import TcpTransport, read_pairs
from robustrl.reconnect.transports.ucx import set_environment
from robustrl.roles import Identity
from robustrl.wire import Secret, frames

MODULES: Final = ("nixl_cu12", "nixl_cu13", "nixl")
MAX_METADATA: Final = 1 << 20
FIRST_LOOK_S: Final = 0.0002
"""How soon a read is looked at; later looks come at longer intervals."""
MAX_PEERS: Final = 16
"""Holders to which a member stays connected."""


class _Agent:
    """A NIXL agent: one a member, because an agent cannot read from itself."""

    def __init__(self, host: str) -> None:
        set_environment(host)
        name = next((name for name in MODULES if importlib.util.find_spec(name)), None)
        if name is None:
            raise MissingDependencyError("the transport nixl needs NIXL", do="Install robustrl[nixl].")
        try:
            api = importlib.import_module(name)
        except ImportError as error:
            raise MissingDependencyError(
                "the transport nixl cannot be loaded", why=str(error), do="Install robustrl[nixl]."
            ) from error
        said = logging.getLogger("nixl")  # it writes to stdout unless told otherwise
        said.handlers.clear()
        said.propagate = True
        said.setLevel(logging.WARNING)
        self._agent = api.nixl_agent(f"robustrl-{secrets.token_hex(8)}", api.nixl_agent_config(backends=["UCX"]))
        self._registered: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._peers: OrderedDict[str, None] = OrderedDict()
        self.stuck: list[Any] = []

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turns NIXL's errors, which are of a dozen classes without a base of their own, into ours."""
        try:
            yield
        except (RuntimeError, ValueError, KeyError) as error:
            raise PeerGoneError("the NIXL transfer failed", why=f"{type(error).__name__}: {error}") from None
        except Exception as error:
            if not type(error).__name__.startswith("nixl"):
                raise
            raise PeerGoneError("the NIXL transfer failed", why=f"{type(error).__name__}: {error}") from None

    def offer(self, content: Content) -> tuple[bytes, int]:
        """What a puller needs to read a content: our metadata, and the address of its first byte."""
        buffer = content.buffer
        assert not isinstance(buffer, DeviceBuffer)  # `RobustConfig.check` sees to it
        with self.errors():
            descriptors = self._registered.get(buffer)
            if descriptors is None:
                descriptors = self.register(buffer.view)
                self._registered[buffer] = descriptors
                weakref.finalize(buffer, self.forget, descriptors).atexit = False
            return self._agent.get_partial_agent_metadata(descriptors, True, ["UCX"]), _address(buffer.view)

    def register(self, view: memoryview) -> Any:
        with self.errors():
            return self._agent.register_memory([(_address(view), len(view), 0, "")], "DRAM")

    def forget(self, descriptors: Any) -> None:
        with contextlib.suppress(PeerGoneError), self.errors():
            self._agent.deregister_memory(descriptors)

    def meet(self, metadata: bytes) -> str:
        with self.errors():
            name = self._agent.add_remote_agent(metadata)
        text = name.decode() if isinstance(name, bytes) else str(name)
        self._peers[text] = None
        self._peers.move_to_end(text)
        while len(self._peers) > MAX_PEERS:
            self.leave(next(iter(self._peers)))
        return text

    def leave(self, peer: str) -> None:
        """Ends the connection to a peer, which otherwise stays for its next version: NIXL pays for each with a file
        descriptor that it does not give back."""
        if peer in self._peers:
            del self._peers[peer]
            with contextlib.suppress(PeerGoneError), self.errors():
                self._agent.remove_remote_agent(peer)

    def read(self, peer: str, there: int, into: memoryview) -> Any:
        """Begins to read `len(into)` bytes at the peer's address `there`."""
        with self.errors():
            ours = self._agent.get_xfer_descs([(_address(into), len(into), 0)], "DRAM")
            theirs = self._agent.get_xfer_descs([(there, len(into), 0)], "DRAM")
            handle = self._agent.initialize_xfer("READ", ours, theirs, peer)
            self._agent.transfer(handle)
        return handle

    def done(self, handle: Any) -> bool:
        with self.errors():
            state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise PeerGoneError("the NIXL transfer failed")
        return bool(state == "DONE")

    def end(self, handle: Any, view: memoryview) -> bool:
        """Gives a transfer up. False when it could not be: its memory is kept and may still be written."""
        try:
            with self.errors():
                self._agent.release_xfer_handle(handle)
        except PeerGoneError:
            self.stuck.append((handle, view))
            return False
        return True


def _address(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, np.uint8).ctypes.data)


class _Conversation(Conversation):
    transport: NixlTransport

    async def answer(self, message: dict[str, Any]) -> None:
        if "metadata" in message:
            content = self.need_content()
            if not content.size:
                raise ProtocolError("a puller wants to read an empty content")
            metadata, address = self.transport.agent.offer(content)
            await self.stream.send({"metadata": metadata, "address": address})
        elif "take" in message:
            content = self.need_content()
            [(start, length)] = check_ranges(read_pairs([message["take"]]), content.size, content.present)
            async with asyncio.timeout(self.transport.timeout_s * IDLE_FACTOR):
                await content.until(start + length)
            await self.stream.send({"ready": True})
            self.gave(length)
        else:
            await super().answer(message)


class _Session(SocketSession):
    def __init__(self, stream: SocketStream, endpoint: str, agent: _Agent, credits: int) -> None:
        super().__init__(stream, endpoint)
        self._agent = agent
        self._credits = credits
        self._peer: str | None = None
        self._well = False
        self._target: Any = None
        self._pending: deque[tuple[Any, memoryview]] = deque()
        self._ready = 0
        """Ranges that were asked for, are there, and are not being read yet."""
        self._hearing: asyncio.Task[None] | None = None

    async def read(self, ranges: Sequence[Range], into: memoryview) -> AsyncIterator[Range]:
        if not ranges:
            return
        await self.stream.send({"metadata": True})
        answer = await frames.read_frame(self.stream)
        metadata, base = answer.get("metadata"), answer.get("address")
        if not isinstance(metadata, bytes) or len(metadata) > MAX_METADATA or type(base) is not int:
            raise ProtocolError(f"{self.endpoint} did not say how its memory is read")
        self._peer = self._agent.meet(metadata)
        self._target = self._agent.register(into)
        self._hearing = asyncio.create_task(self._hear())
        left, asked, reading = deque(ranges), deque[Range](), deque[Range]()
        pause = FIRST_LOOK_S
        while left or asked or reading:
            while left and len(asked) + len(reading) < self._credits:
                asked.append(left.popleft())
                await self._say(asked[-1])
            while self._ready:
                if not asked:
                    raise ProtocolError(f"{self.endpoint} answered what was not asked")
                self._ready -= 1
                reading.append(asked.popleft())
                start, length = reading[-1]
                view = into[start : start + length]
                self._pending.append((self._agent.read(self._peer, base + start, view), view))
            if reading and self._agent.done(self._pending[0][0]):
                self._agent.end(*self._pending.popleft())
                landed = reading.popleft()
                self._well = not (left or asked or reading)
                pause = FIRST_LOOK_S
                yield landed
                continue
            if self._hearing.done():
                self._hearing.result()
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.002)

    async def _hear(self) -> None:
        """The holder says in the order of our asking what can be read."""
        while True:
            answer = await frames.read_frame(self.stream)
            if answer.get("ready") is not True:
                raise ProtocolError(f"{self.endpoint} answered a read with something else")
            self._ready += 1

    async def _say(self, wanted: Range) -> None:
        try:
            await self.stream.send({"take": wanted})
        except OSError as error:
            raise PeerGoneError(f"{self.endpoint} ended the connection", why=str(error) or None) from None

    async def close(self) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
            await asyncio.gather(self._hearing, return_exceptions=True)
        for handle, view in self._pending:
            self.tainted |= not self._agent.end(handle, view)
        self._pending.clear()
        if self._target is not None and not self.tainted:
            self._agent.forget(self._target)
        self._target = None
        if self._peer is not None and not self._well:
            self._agent.leave(self._peer)
        self._peer = None
        await super().close()


class NixlTransport(TcpTransport):
    """NIXL's reads beside a TCP connection. NIXL is loaded when the first content is read, by either side."""

    name = "nixl"
    conversation = _Conversation

    def __init__(self, identity: Identity, secret: Secret, *, host: str, timeout_s: float, credits: int = 4) -> None:
        super().__init__(identity, secret, host=host, timeout_s=timeout_s)
        self.credits = credits
        self._agent: _Agent | None = None

    @property
    def agent(self) -> _Agent:
        if self._agent is None:
            self._agent = _Agent(self.host)
        return self._agent

    async def connect(self, endpoint: str) -> Session:
        try:
            agent = self.agent
        except MissingDependencyError as error:
            raise TransportError("NIXL cannot be used here", why=str(error)) from error
        return _Session(await self.meet(endpoint), endpoint, agent, self.credits)

    async def close(self) -> None:
        await super().close()
        self._agent = None
