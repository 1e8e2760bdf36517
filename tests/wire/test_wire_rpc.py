"""Calls: many at a time, each with a deadline, over servers that die and come back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from robustrl import errors
from robustrl.errors import (
    DeadlineError,
    FencedError,
    IllegalMoveError,
    JobFailedError,
    PeerGoneError,
    RemoteError,
    RobustError,
    RoleDownError,
    WeightMismatchError,
)
from robustrl.roles import Identity
from robustrl.wire import Address, Handler, RpcClient, RpcServer, Secret, bind, frames

SECRET = Secret(b"the secret of this job")
ME = Identity.parse("rollout/1#3")
OTHER = Identity.parse("rollout/2#1")

SERVER = """
import asyncio, os, socket, sys
from robustrl.wire import RpcServer, Secret

async def handle(caller, method, params):
    if method == "hang":
        await asyncio.sleep(3600)
    return [sys.argv[2], os.getpid(), method]

async def main():
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.setblocking(False)
    server = RpcServer(handle, Secret(b"the secret of this job"), sock)
    await server.start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def serving(handler: Handler, sock: socket.socket | None = None, **callbacks: Any) -> AsyncIterator[RpcServer]:
    server = RpcServer(handler, SECRET, sock or bind(), **callbacks)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def client(locate: Any, identity: Identity = ME, **more: Any) -> AsyncIterator[RpcClient]:
    where = (lambda: locate) if isinstance(locate, Address) else locate
    made = RpcClient(where, identity, SECRET, **({"patience_s": 20.0, "server": "the test server"} | more))
    try:
        yield made
    finally:
        await made.close()


async def echo(caller: Identity, method: str, params: dict[str, Any]) -> Any:
    return params


async def until(predicate: Callable[[], Any], timeout: float = 10.0) -> None:
    async with asyncio.timeout(timeout):
        while not predicate():  # noqa: ASYNC110 - what is waited for has no Event
            await asyncio.sleep(0.01)


# -- one server ---------------------------------------------------------------------------------------------------


def test_many_calls_at_once_get_each_their_own_answer() -> None:
    async def shuffled(caller: Identity, method: str, params: dict[str, Any]) -> Any:
        await asyncio.sleep((params["n"] * 7 % 11) / 1000)
        return params["n"]

    async def run() -> None:
        async with serving(shuffled) as server, client(server.address) as rpc:
            assert await asyncio.gather(*(rpc.call("one", n=n) for n in range(300))) == list(range(300))

    asyncio.run(run())


def test_a_slow_call_does_not_hold_up_others() -> None:
    async def handle(caller: Identity, method: str, params: dict[str, Any]) -> Any:
        if method == "slow":
            await asyncio.Event().wait()
        return method

    async def run() -> None:
        async with serving(handle) as server, client(server.address) as rpc:
            slow = asyncio.create_task(rpc.call("slow"))
            assert await rpc.call("quick") == "quick"
            assert not slow.done()
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)

    asyncio.run(run())


def test_errors_of_robustrl_arrive_as_their_class_with_all_they_say() -> None:
    async def handle(caller: Identity, method: str, params: dict[str, Any]) -> Any:
        raise getattr(errors, method)("what failed", who="trainer/0#2", why="because", do="Do this.")

    async def run() -> None:
        async with serving(handle) as server, client(server.address) as rpc:
            for kind in (WeightMismatchError, IllegalMoveError, FencedError, JobFailedError):
                with pytest.raises(kind) as caught:
                    await rpc.call(kind.__name__)
                error = caught.value
                assert type(error) is kind
                assert (error.what, error.who, error.why, error.do) == (
                    "what failed",
                    "trainer/0#2",
                    "because",
                    "Do this.",
                )

    asyncio.run(run())


def test_other_errors_arrive_as_remote_errors_that_name_their_class() -> None:
    async def handle(caller: Identity, method: str, params: dict[str, Any]) -> Any:
        raise ZeroDivisionError("by zero")

    async def run() -> None:
        async with serving(handle) as server, client(server.address) as rpc:
            with pytest.raises(RemoteError, match="by zero") as caught:
                await rpc.call("divide")
            assert caught.value.kind == "ZeroDivisionError"

    asyncio.run(run())


@pytest.mark.parametrize("answer", [object(), 1 << 80, bytes(frames.MAX_FRAME)], ids=["object", "number", "size"])
def test_an_answer_that_cannot_be_sent_is_an_error_and_not_silence(answer: object) -> None:
    async def handle(caller: Identity, method: str, params: dict[str, Any]) -> Any:
        return answer

    async def run() -> None:
        async with serving(handle) as server, client(server.address) as rpc:
            begun = time.monotonic()
            with pytest.raises(RobustError) as caught:
                await rpc.call("give", timeout=15.0)
            assert not isinstance(caught.value, DeadlineError)
            assert time.monotonic() - begun < 10.0

    asyncio.run(run())


def test_a_silent_method_ends_in_a_deadline_that_says_who_waited_for_whom_and_how_long() -> None:
    async def handle(caller: Identity, method: str, params: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    async def run() -> None:
        async with serving(handle) as server, client(server.address) as rpc:
            with pytest.raises(DeadlineError) as caught:
                await rpc.call("think", timeout=0.2)
            text = str(caught.value)
            for part in ("rollout/1#3", "think", "the test server", "0.2 s", "connected and silent"):
                assert part in text
            assert await asyncio.gather(rpc.call("think", timeout=0.1), return_exceptions=True)

    asyncio.run(run())


def test_a_server_that_is_nowhere_ends_in_a_deadline_that_says_why() -> None:
    sock = bind()
    nowhere = Address(*sock.getsockname()[:2])
    sock.close()

    async def run() -> None:
        async with client(nowhere) as rpc:
            with pytest.raises(DeadlineError, match=f"cannot connect to the test server at {nowhere}"):
                await rpc.call("hello", timeout=0.3)

    asyncio.run(run())


def test_pushes_reach_one_or_all_and_a_failing_listener_does_not_end_the_connection() -> None:
    async def run() -> None:
        heard: list[tuple[str, str, Any]] = []

        def listen(name: str) -> Callable[[str, dict[str, Any]], None]:
            def on_push(method: str, params: dict[str, Any]) -> None:
                heard.append((name, method, params))
                if params.get("bad"):
                    raise ValueError("the listener fails")

            return on_push

        async with (
            serving(echo) as server,
            client(server.address, on_push=listen("me")) as mine,
            client(server.address, OTHER, on_push=listen("other")) as theirs,
        ):
            await asyncio.gather(mine.call("x"), theirs.call("x"))
            server.notify("all", bad=True)
            server.notify("one", to=OTHER, n=1)
            await until(lambda: len(heard) == 3)
            assert sorted(heard) == [
                ("me", "all", {"bad": True}),
                ("other", "all", {"bad": True}),
                ("other", "one", {"n": 1}),
            ]
            assert await mine.call("still", a=1) == {"a": 1}

    asyncio.run(run())


def test_joining_and_leaving_are_said_and_a_dropped_identity_is_gone() -> None:
    async def run() -> None:
        story: list[str] = []
        async with serving(
            echo, on_join=lambda who: story.append(f"+{who}"), on_leave=lambda who: story.append(f"-{who}")
        ) as server:
            async with client(server.address) as rpc, client(server.address, OTHER) as other:
                await rpc.call("x")
                await other.call("x")
                server.drop(ME)
                await until(lambda: f"-{ME}" in story)
                assert server.connected() == {OTHER}
            await until(lambda: f"-{OTHER}" in story)
            assert story == [f"+{ME}", f"+{OTHER}", f"-{ME}", f"-{OTHER}"]

    asyncio.run(run())


def test_a_message_without_a_number_is_handled_and_not_answered() -> None:
    async def run() -> None:
        got: list[Any] = []

        async def handle(caller: Identity, method: str, params: dict[str, Any]) -> Any:
            got.append((method, params))

        async with serving(handle) as server, client(server.address) as rpc:
            assert not await rpc.post("beat", n=0)  # not connected: not sent, and no error
            await rpc.connect()
            assert await rpc.post("beat", n=1)
            await rpc.call("sync")
            assert got == [("beat", {"n": 1}), ("sync", {})]

    asyncio.run(run())


# -- the end of a client ------------------------------------------------------------------------------------------


def test_fail_ends_present_and_future_calls_at_once_with_the_cause() -> None:
    async def hang(caller: Identity, method: str, params: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    cause = JobFailedError("the job was given up", why="the first cause")

    async def run() -> None:
        async with serving(hang) as server, client(server.address) as rpc:
            waiting = [asyncio.create_task(rpc.call("hang")) for _ in range(3)]
            await until(lambda: len(rpc._waiting) == 3)
            rpc.fail(cause)
            async with asyncio.timeout(5.0):
                assert await asyncio.gather(*waiting, return_exceptions=True) == [cause] * 3
            with pytest.raises(JobFailedError, match="the first cause"):
                await rpc.call("more")

    asyncio.run(run())


@pytest.mark.parametrize("how", ["the search takes long", "nobody knows"])
def test_fail_reaches_a_call_that_is_still_looking_for_the_server(how: str) -> None:
    async def run() -> None:
        looking = asyncio.Event()

        async def locate() -> Address:
            looking.set()
            if how == "nobody knows":
                raise RoleDownError("nobody serves it")
            await asyncio.Event().wait()
            raise AssertionError

        async with client(locate) as rpc:
            waiting = asyncio.create_task(rpc.call("hello"))
            await looking.wait()
            rpc.fail(JobFailedError("the job was given up"))
            with pytest.raises(JobFailedError):
                async with asyncio.timeout(5.0):
                    await waiting

    asyncio.run(run())


def test_a_closed_client_ends_its_calls_and_does_not_connect_any_more() -> None:
    async def hang(caller: Identity, method: str, params: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    async def run() -> None:
        async with serving(hang) as server, client(server.address) as rpc:
            waiting = asyncio.create_task(rpc.call("hang"))
            await until(lambda: rpc._waiting)
            await rpc.close()
            with pytest.raises(PeerGoneError, match="closed"):
                await waiting
            with pytest.raises(PeerGoneError, match="closed"):
                await rpc.call("again")
            await until(lambda: not server.connected())

    asyncio.run(run())


def test_a_client_that_is_closed_while_it_connects_keeps_no_connection() -> None:
    async def run() -> None:
        go = asyncio.Event()

        async with serving(echo) as server:

            async def locate() -> Address:
                await go.wait()
                return server.address

            async with client(locate) as rpc:
                waiting = asyncio.create_task(rpc.call("hello"))
                await asyncio.sleep(0)
                await rpc.close()
                go.set()
                with pytest.raises(PeerGoneError):
                    await waiting
                assert not rpc.connected
                await until(lambda: not server.connected())

    asyncio.run(run())


def test_strange_answers_of_a_server_are_passed_over() -> None:
    async def run() -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        async with serving(echo) as server, client(server.address) as rpc:
            await rpc.connect()
            await until(server.connected)
            (writer,) = server._connections
            for strange in ({"id": [1]}, {"id": {}}, {"id": 99, "ok": 1}, {"push": 3, "params": None}, {}):
                writer.write(frames.encode(strange))
            assert await rpc.call("still", a=1) == {"a": 1}
        assert not problems

    asyncio.run(run())


# -- servers that die ---------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[socket.socket, str], subprocess.Popen[bytes]]]:
    """Starts server processes on sockets that the test holds, as the launcher does for the supervisor."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(sock: socket.socket, name: str) -> subprocess.Popen[bytes]:
        started.append(
            subprocess.Popen([sys.executable, "-c", SERVER, str(sock.fileno()), name], pass_fds=(sock.fileno(),))
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_a_call_survives_a_server_that_is_killed_and_replaced_on_the_same_socket(start: Any) -> None:
    async def run() -> None:
        with bind() as sock:
            first = start(sock, "first")
            async with client(Address(*sock.getsockname()[:2])) as rpc:
                name, pid, _ = await rpc.call("hello")
                assert (name, pid) == ("first", first.pid)
                calls = [asyncio.create_task(rpc.call("quick" if n else "hang", timeout=15.0)) for n in range(20)]
                await until(lambda: rpc._waiting)
                first.kill()
                calls += [asyncio.create_task(rpc.call("late")) for _ in range(20)]  # nobody reads; the socket is there
                await asyncio.to_thread(first.wait)
                start(sock, "second")
                names = {(await call)[0] for call in calls[1:]}
                assert "second" in names
                assert names <= {"first", "second"}
                assert (await rpc.call("hello"))[0] == "second"
                calls[0].cancel()
                await asyncio.gather(calls[0], return_exceptions=True)

    asyncio.run(run())


def test_a_call_follows_the_server_to_another_address(start: Any) -> None:
    async def run() -> None:
        with bind() as here, bind() as there:
            where = [Address(*here.getsockname()[:2])]
            connects: list[int] = []
            first = start(here, "first")
            async with client(lambda: where[0], on_connect=lambda: connects.append(1)) as rpc:
                assert (await rpc.call("hello"))[0] == "first"
                first.kill()
                await asyncio.to_thread(first.wait)
                here.close()
                waiting = asyncio.create_task(rpc.call("hello"))
                await until(lambda: not rpc.connected)
                start(there, "second")
                where[0] = Address(*there.getsockname()[:2])
                assert (await waiting)[0] == "second"
                assert len(connects) == 2

    asyncio.run(run())


def test_a_stopped_server_costs_no_more_than_the_deadline(start: Any) -> None:
    async def run() -> None:
        with bind() as sock:
            server = start(sock, "first")
            async with client(Address(*sock.getsockname()[:2])) as rpc:
                await rpc.call("hello")
                os.kill(server.pid, signal.SIGSTOP)
                with pytest.raises(DeadlineError):
                    await rpc.call("hello", timeout=0.3)
                os.kill(server.pid, signal.SIGCONT)
                assert (await rpc.call("hello"))[0] == "first"

    asyncio.run(run())
