"""Calls over one connection: many at a time, each with a deadline, retried over reconnects by the client.

A call may reach the server twice (the connection broke after the work was done and before the answer came), so every
method of robustrl is written to be called twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from robustrl import errors
from robustrl.errors import (
    DeadlineError,
    FencedError,
    HandshakeRefusedError,
    PeerGoneError,
    RemoteError,
    RobustError,
    RoleDownError,
)
from robustrl.roles import Identity
from robustrl.wire import frames, handshake
from robustrl.wire.address import Address
from robustrl.wire.handshake import Admit, Secret

log = logging.getLogger("robustrl.wire")

Handler = Callable[[Identity, str, dict[str, Any]], Awaitable[Any]]
"""Answers a call: (who calls, method, parameters) -> a value of msgpack's types."""

Locate = Callable[[], "Address | Awaitable[Address]"]
"""Where the server is now. Raises RoleDownError while nobody knows."""


class Call(Protocol):
    """How a room calls a server without knowing where it is: what `RpcClient.call` is."""

    async def __call__(self, method: str, /, *, timeout: float | None = None, **params: Any) -> Any: ...


def _error_message(error: BaseException) -> dict[str, str]:
    if isinstance(error, RobustError):
        return {
            "kind": type(error).__name__,
            "what": error.what,
            "who": error.who or "",
            "why": error.why or "",
            "do": error.do or "",
        }
    return {"kind": type(error).__name__, "what": str(error) or type(error).__name__, "who": "", "why": "", "do": ""}


def _error_from(message: Any, method: str) -> RobustError:
    if not isinstance(message, dict):
        return RemoteError(f"{method} failed", kind="unknown")
    kind = str(message.get("kind", "unknown"))
    what = str(message.get("what", ""))
    who, why, do = (str(message.get(key) or "") or None for key in ("who", "why", "do"))
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, RobustError) and found is not RemoteError:
        return found(what, who=who, why=why, do=do)
    return RemoteError(f"{method}: {what}", kind=kind, who=who, why=why)


class RpcServer:
    """Serves calls to members that know the job's secret.

    Args:
        handler: answers the calls.
        secret: the job's secret.
        sock: a listening socket (see `wire.bind`); the server closes it.
        admit: refuses identities (fencing).
        on_join, on_leave: called with the identity when a member's connection begins and ends.
    """

    def __init__(
        self,
        handler: Handler,
        secret: Secret,
        sock: socket.socket,
        *,
        admit: Admit | None = None,
        on_join: Callable[[Identity], None] | None = None,
        on_leave: Callable[[Identity], None] | None = None,
    ) -> None:
        self._handler = handler
        self._secret = secret
        self._sock = sock
        self._admit = admit
        self._on_join = on_join
        self._on_leave = on_leave
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.StreamWriter, Identity] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        host, port = sock.getsockname()[:2]
        self.address = Address(host, port)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._sock)

    def notify(self, method: str, to: Identity | None = None, **params: Any) -> None:
        """Pushes a message that has no answer to one member, or to all that are connected."""
        data = frames.encode({"push": method, "params": params})
        for writer, identity in list(self._connections.items()):
            if to is None or identity == to:
                writer.write(data)

    def connected(self) -> set[Identity]:
        return set(self._connections.values())

    def drop(self, identity: Identity) -> None:
        """Ends the connections of an identity that is not welcome any more."""
        for writer, who in list(self._connections.items()):
            if who == identity:
                writer.close()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._connections):
            writer.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._server.wait_closed(), 1.0)
        self._sock.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        calls: set[asyncio.Task[None]] = set()
        identity: Identity | None = None
        try:
            identity = await handshake.accept(reader, writer, self._secret, self._admit)
            self._connections[writer] = identity
            if self._on_join:
                self._on_join(identity)
            while True:
                message = await frames.read_frame(reader)
                call = asyncio.create_task(self._answer(identity, message, writer))
                calls.add(call)
                call.add_done_callback(calls.discard)
        except PeerGoneError:
            pass
        except (RobustError, TimeoutError, OSError) as error:
            log.warning("connection from %s closed: %s", identity or writer.get_extra_info("peername"), error)
        except asyncio.CancelledError:
            pass
        finally:
            for call in calls:
                call.cancel()
            self._tasks.discard(task)
            known = self._connections.pop(writer, None)
            writer.close()
            if known is not None and self._on_leave:
                self._on_leave(known)

    async def _answer(self, caller: Identity, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number, method, params = message.get("id"), message.get("call"), message.get("params")
        if not isinstance(method, str) or not isinstance(params, dict):
            writer.close()
            return
        reply: dict[str, Any] = {"id": number}
        try:
            reply["ok"] = await self._handler(caller, method, params)
        except RobustError as error:
            reply["error"] = _error_message(error)
        except Exception as error:
            log.exception("%s called by %s failed", method, caller)
            reply["error"] = _error_message(error)
        if number is None or writer.is_closing():
            return
        try:
            data = frames.encode(reply)
        except (RobustError, TypeError, ValueError, OverflowError) as error:
            log.warning("the answer of %s to %s cannot be sent: %s", method, caller, error)
            data = frames.encode({"id": number, "error": _error_message(error)})
        try:
            writer.write(data)
            await writer.drain()
        except ConnectionError as error:
            log.warning("the answer of %s did not reach %s: %s", method, caller, error)


class RpcClient:
    """Calls a server that may die and come back elsewhere.

    Args:
        locate: where the server is now; asked again at each reconnect.
        identity: who calls.
        secret: the job's secret.
        on_push: called with (method, params) for each pushed message.
        on_connect: called after each successful connect, before waiting calls are sent.
        patience_s: how long a call without a timeout of its own waits for a server that is away.
        server: the name of the server in errors ("the ledger").
    """

    def __init__(
        self,
        locate: Locate,
        identity: Identity,
        secret: Secret,
        *,
        on_push: Callable[[str, dict[str, Any]], None] | None = None,
        on_connect: Callable[[], None] | None = None,
        patience_s: float = 60.0,
        server: str = "the server",
    ) -> None:
        self._locate = locate
        self.identity = identity
        self._secret = secret
        self._on_push = on_push
        self._on_connect = on_connect
        self.patience_s = patience_s
        self._server_name = server
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._limits: set[asyncio.Timeout] = set()
        self._closed = False
        self.fatal: RobustError | None = None
        """Set to stop all present and future calls with this error (the job failed, we are fenced)."""

    @property
    def connected(self) -> bool:
        return self._writer is not None

    async def call(self, method: str, /, *, timeout: float | None = None, **params: Any) -> Any:
        """Calls `method` and returns its value.

        Raises:
            DeadlineError: no answer within `timeout` (default: `patience_s`), reconnects included.
            FencedError, HandshakeRefusedError: the server does not want us; not retried.
            RobustError: what the method raised.
        """
        limit = self.patience_s if timeout is None else timeout
        last: Exception | None = None
        try:
            async with asyncio.timeout(limit) as until:
                self._limits.add(until)
                for pause in itertools.chain((0.02, 0.05, 0.1), itertools.repeat(0.2)):
                    if self.fatal is not None:
                        raise self.fatal
                    try:
                        await self.connect()
                        return await self._call_once(method, params)
                    except (FencedError, HandshakeRefusedError):
                        raise
                    except (PeerGoneError, RoleDownError, OSError) as error:
                        if isinstance(error, TimeoutError) and not isinstance(error, RobustError):
                            raise
                        last = error
                    if self._closed:
                        raise PeerGoneError(f"{method}: the client was closed", who=self.identity)
                    await asyncio.sleep(pause)
        except TimeoutError as error:
            if isinstance(error, RobustError):
                raise
            if self.fatal is not None:
                raise self.fatal from None
            raise DeadlineError(
                f"{method}: no answer from {self._server_name} within {limit:g} s",
                who=self.identity,
                why=str(last) if last else "it is connected and silent",
            ) from last
        finally:
            self._limits.discard(until)
        raise AssertionError("unreachable")

    async def post(self, method: str, /, **params: Any) -> bool:
        """Sends without waiting for an answer, if connected now. Returns whether it was sent."""
        if self._writer is None:
            return False
        self._writer.write(frames.encode({"call": method, "params": params}))
        return True

    def fail(self, error: RobustError) -> None:
        """Ends every present and future call with `error`."""
        self.fatal = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        # Who is still looking for the server, or waits for the next try, hears it now as well.
        for until in self._limits:
            if not until.expired():
                until.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        self._closed = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._drop(PeerGoneError("the client was closed", who=self.identity))

    async def connect(self) -> None:
        """Connects now if there is no connection."""
        async with self._connecting:
            if self._writer is not None or self._closed:
                return
            found = self._locate()
            address = await found if inspect.isawaitable(found) else found
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(address.host, address.port), 5.0)
            except (OSError, TimeoutError) as error:
                raise PeerGoneError(
                    f"cannot connect to {self._server_name} at {address}", why=str(error) or type(error).__name__
                ) from error
            try:
                await handshake.offer(reader, writer, self._secret, self.identity)
            except TimeoutError as error:
                writer.close()
                raise PeerGoneError(f"{self._server_name} at {address} accepts and does not answer") from error
            except BaseException:
                writer.close()
                raise
            self._begin(reader, writer)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:  # while it connected
            writer.close()
            return
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader, writer))
        if self._on_connect:
            self._on_connect()

    async def _call_once(self, method: str, params: dict[str, Any]) -> Any:
        writer = self._writer
        if writer is None:
            raise PeerGoneError(f"not connected to {self._server_name}")
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            writer.write(frames.encode({"id": number, "call": method, "params": params}))
            return await future
        finally:
            self._waiting.pop(number, None)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cause: RobustError = PeerGoneError(f"the connection to {self._server_name} ended")
        try:
            while True:
                message = await frames.read_frame(reader)
                if "push" in message:
                    if self._on_push:
                        try:
                            self._on_push(str(message["push"]), dict(message.get("params") or {}))
                        except Exception:
                            log.exception("handling %s failed", message["push"])
                    continue
                number = message.get("id")
                future = self._waiting.get(number) if isinstance(number, int) else None
                if future is None or future.done():
                    continue
                if "error" in message:
                    future.set_exception(_error_from(message["error"], self._server_name))
                else:
                    future.set_result(message.get("ok"))
        except RobustError as error:
            cause = error
        finally:
            writer.close()
            if self._writer is writer:
                self._drop(cause)

    def _drop(self, cause: RobustError) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerGoneError(cause.what, who=cause.who, why=cause.why))
