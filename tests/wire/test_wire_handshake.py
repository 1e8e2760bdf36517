"""The handshake over real sockets: who is let in, who is not, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robustrl.errors import (
    ConfigError,
    DeadlineError,
    FencedError,
    HandshakeRefusedError,
    PeerGoneError,
    ProtocolError,
    RobustError,
)
from robustrl.roles import Identity
from robustrl.wire import Address, RpcClient, RpcServer, Secret, bind, frames, handshake

SECRET = Secret(b"the secret of this job")
OTHER = Secret(b"the secret of another job")
ROLLOUT = Identity.parse("rollout/1#3")


async def echo(caller: Identity, method: str, params: dict[str, Any]) -> Any:
    return {"caller": str(caller), "method": method, "params": params}


@contextlib.asynccontextmanager
async def serving(admit: handshake.Admit | None = None) -> AsyncIterator[RpcServer]:
    server = RpcServer(echo, SECRET, bind(), admit=admit)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def client(address: Address, secret: Secret = SECRET, identity: Identity = ROLLOUT) -> AsyncIterator[RpcClient]:
    made = RpcClient(lambda: address, identity, secret, patience_s=10.0, server="the test server")
    try:
        yield made
    finally:
        await made.close()


def test_a_member_that_knows_the_secret_is_served_under_its_identity() -> None:
    async def run() -> None:
        async with serving() as server, client(server.address) as rpc:
            answer = await rpc.call("hello", x=b"\0\xff", y=[1, None])
            assert answer == {"caller": "rollout/1#3", "method": "hello", "params": {"x": b"\0\xff", "y": [1, None]}}
            assert server.connected() == {ROLLOUT}

    asyncio.run(run())


def test_a_wrong_secret_is_refused_at_once_and_not_tried_again() -> None:
    async def run() -> None:
        async with serving() as server, client(server.address, OTHER) as rpc:
            begun = time.monotonic()
            with pytest.raises(HandshakeRefusedError, match="does not know this job's secret"):
                await rpc.call("hello")
            assert time.monotonic() - begun < 5.0
            assert not server.connected()

    asyncio.run(run())


def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.encode({"proto": handshake.PROTOCOL_VERSION, "nonce": bytes(16)}))
        await frames.read_frame(reader)
        writer.write(frames.encode({"mac": bytes(32)}))
        writer.close()

    async def run() -> None:
        async with strange_server(impostor) as address, client(address) as rpc:
            with pytest.raises(HandshakeRefusedError, match="server does not know"):
                await rpc.call("hello")

    asyncio.run(run())


def test_a_server_of_another_protocol_version_is_named() -> None:
    async def newer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.encode({"proto": 99, "nonce": bytes(16)}))
        with contextlib.suppress(PeerGoneError):
            await frames.read_frame(reader)
        writer.close()

    async def run() -> None:
        async with strange_server(newer) as address, client(address) as rpc:
            with pytest.raises(HandshakeRefusedError, match="99"):
                await rpc.call("hello")

    asyncio.run(run())


def test_a_client_of_another_protocol_version_is_told_so() -> None:
    async def run() -> None:
        async with serving() as server:
            reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
            await frames.read_frame(reader)
            writer.write(frames.encode({"proto": 0, "nonce": bytes(16), "identity": "rollout/1#1", "mac": bytes(32)}))
            answer = await frames.read_frame(reader)
            assert "version" in answer["refused"]
            with pytest.raises(PeerGoneError):
                await frames.read_frame(reader)
            writer.close()

    asyncio.run(run())


def test_a_recorded_handshake_is_worthless() -> None:
    async def run() -> None:
        async with serving() as server:
            nonce = b"n" * 16
            reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
            hello = await frames.read_frame(reader)
            offer = {
                "proto": handshake.PROTOCOL_VERSION,
                "nonce": nonce,
                "identity": str(ROLLOUT),
                "mac": SECRET.mac("client", hello["nonce"] + nonce, str(ROLLOUT)),
            }
            writer.write(frames.encode(offer))
            assert "mac" in await frames.read_frame(reader)
            writer.close()
            reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
            await frames.read_frame(reader)
            writer.write(frames.encode(offer))
            assert "refused" in await frames.read_frame(reader)
            writer.close()

    asyncio.run(run())


def test_an_older_incarnation_hears_that_it_is_fenced() -> None:
    def admit(identity: Identity) -> RobustError | None:
        return FencedError("replaced", why="rollout/1#4 is in its place") if identity.incarnation < 4 else None

    async def run() -> None:
        async with serving(admit) as server:
            async with client(server.address) as old:
                with pytest.raises(FencedError, match="rollout/1#4"):
                    await old.call("hello")
            async with client(server.address, identity=Identity.parse("rollout/1#4")) as new:
                assert await new.call("hello")

    asyncio.run(run())


@contextlib.asynccontextmanager
async def strange_server(serve: Any) -> AsyncIterator[Address]:
    sock = bind()
    server = await asyncio.start_server(serve, sock=sock)
    try:
        yield Address(*sock.getsockname()[:2])
    finally:
        server.close()


def test_a_peer_that_accepts_and_never_answers_costs_a_bounded_time() -> None:
    async def run() -> None:
        sock = bind()  # the kernel accepts; nobody reads
        try:
            async with client(Address(*sock.getsockname()[:2])) as rpc:
                begun = time.monotonic()
                with pytest.raises(DeadlineError) as caught:
                    await rpc.call("hello", timeout=0.6)
                assert time.monotonic() - begun < 5.0
                assert "hello: no answer from the test server within 0.6 s" in str(caught.value)
                assert "rollout/1#3" in str(caught.value)
        finally:
            sock.close()

    asyncio.run(run())


def test_the_handshake_itself_is_bounded_without_a_deadline_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HELLO_SECONDS", 0.2)

    async def run() -> None:
        sock = bind()
        try:
            async with client(Address(*sock.getsockname()[:2])) as rpc:
                with pytest.raises(PeerGoneError, match="accepts and does not answer"):
                    await rpc.connect()
        finally:
            sock.close()

    asyncio.run(run())


def test_a_client_that_connects_and_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HELLO_SECONDS", 0.2)

    async def run() -> None:
        async with serving() as server:
            reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
            async with asyncio.timeout(5.0):
                assert await reader.read()
            writer.close()

    asyncio.run(run())


@settings(max_examples=25, deadline=None)
@given(st.binary(min_size=4, max_size=200))
def test_a_stranger_that_sends_garbage_disturbs_nobody(garbage: bytes) -> None:
    async def run() -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        async with serving() as server, client(server.address) as rpc:
            assert await rpc.call("before")
            _, writer = await asyncio.open_connection(server.address.host, server.address.port)
            writer.write(garbage)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            writer.close()
            assert await rpc.call("after")
            assert server.connected() == {ROLLOUT}
        assert not problems

    asyncio.run(run())


def test_a_stranger_gets_no_more_memory_than_a_hello_needs() -> None:
    async def run() -> None:
        async with serving() as server:
            reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
            await frames.read_frame(reader)
            writer.write((handshake.HELLO_LIMIT + 1).to_bytes(4, "big"))
            with pytest.raises(PeerGoneError):
                async with asyncio.timeout(5.0):
                    await frames.read_frame(reader)
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("change", [{"nonce": b"short"}, {"nonce": 7}, {"mac": "text"}, {"identity": 3}, {"mac": None}])
def test_a_malformed_offer_is_refused(change: dict[str, Any]) -> None:
    async def run() -> None:
        async with serving() as server:
            reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
            await frames.read_frame(reader)
            offer = {"proto": 1, "nonce": bytes(16), "identity": "rollout/1#1", "mac": bytes(32)} | change
            writer.write(frames.encode(offer))
            assert "refused" in await frames.read_frame(reader)
            writer.close()

    asyncio.run(run())


def test_the_secret_is_kept_for_its_owner_and_never_printed(tmp_path: Path) -> None:
    secret = Secret.create(tmp_path / "secret")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert Secret.read(tmp_path / "secret").mac("client", b"", "x") == secret.mac("client", b"", "x")
    assert (tmp_path / "secret").read_text() not in repr(secret) + str(secret)
    with pytest.raises(ConfigError, match="secret"):
        Secret.read(tmp_path / "missing")
    with pytest.raises(ConfigError, match="too short"):
        Secret(b"short")


def test_what_speaks_no_protocol_at_all_is_a_protocol_error() -> None:
    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def run() -> None:
        async with strange_server(web) as address, client(address) as rpc:
            with pytest.raises(ProtocolError):
                await rpc.call("hello")

    asyncio.run(run())
