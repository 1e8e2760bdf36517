"""The same suite under faults: sources and pullers killed, frozen, mute, corrupt or outdated, on every transport."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from weights_rig import SECRET, RemoteFailure, Rig, fingerprint, make_tensors, wait_until

from robustrl import events
from robustrl.config import ReconnectConfig
from robustrl.errors import HandshakeRefusedError, TransportError
from robustrl.reconnect import transports
from robustrl.reconnect.directory import Offer
from robustrl.roles import Identity, Version
from robustrl.wire import Secret

NEEDS_UCX = pytest.mark.skipif(not importlib.util.find_spec("ucxx"), reason="needs ucxx")
NEEDS_NIXL = pytest.mark.skipif(not transports.nixl_installed(), reason="needs NIXL (robustrl[nixl])")
TRANSPORTS = ["tcp", pytest.param("ucx", marks=NEEDS_UCX), "shm", pytest.param("nixl", marks=NEEDS_NIXL)]
MIB = 24.0
"""More than what fits into the buffers of a socket: a source that stops leaves a pull unfinished."""


@pytest.fixture(params=TRANSPORTS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(ReconnectConfig(transport=request.param, chunk_bytes=64 << 10, timeout_s=1.0))
    yield rig
    rig.close()


def published(rig: Rig, mib: float = MIB) -> str:
    """A trainer and the relay rollout/0 hold version 1.1 and its digest is returned."""
    digest: str = rig.member("trainer/0#1").ask("publish", version="1.1", seed=1, mib=mib)[0]
    assert rig.member("rollout/0#1").ask("pull") == ("1.1", digest)
    return digest


def correct(rig: Rig, puller: int, mib: float = MIB) -> bool:
    _, got, _ = rig.members[puller].ask("apply", seed=1, mib=mib)
    return bool(got == fingerprint(make_tensors(1, mib)))


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_source_lost_in_mid_pull_is_replaced_and_only_missing_chunks_travel_again(rig: Rig, fault: str) -> None:
    digest = published(rig)
    relay, late = rig.members[1], rig.member("rollout/1#1")
    late.ask("slow", pause_s=0.01)
    pulling = late.begin("pull")
    wait_until(lambda: late.landed.value >= 3)
    relay.signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    began = time.monotonic()
    assert late.end(pulling) == ("1.1", digest)
    assert time.monotonic() - began < 6
    assert correct(rig, 2)
    stats = late.ask("stats")
    if rig.config.transport != "shm":  # whose memory outlives its owner
        assert stats["sources"] == [["rollout/0#1", "trainer/0#1"]]
        assert rig.members[0].ask("stats")["served"] < 2 * MIB * (1 << 20)
    assert stats["pulled"] < (MIB + 1) * (1 << 20)


def test_a_frozen_source_costs_its_deadline_and_then_others_avoid_it(rig: Rig) -> None:
    digest = published(rig, 1.0)
    rig.members[1].signal(signal.SIGSTOP)
    began = time.monotonic()
    late = rig.member("rollout/1#1")
    assert late.ask("pull") == ("1.1", digest)
    assert time.monotonic() - began < 4
    assert late.ask("stats")["sources"] == [["trainer/0#1"]]
    assert any("gave up source rollout/0#1" in event.text for event in rig.events if isinstance(event, events.Alarm))
    began = time.monotonic()
    assert rig.member("rollout/2#1").ask("pull") == ("1.1", digest)
    assert time.monotonic() - began < 2


def test_a_killed_trainer_without_a_relay_leaves_the_old_version_and_its_successor_goes_on(rig: Rig) -> None:
    trainer, rollout = rig.member("trainer/0#1"), rig.member("rollout/0#1")
    old, _ = trainer.ask("publish", version="1.1", seed=9, mib=MIB)
    rollout.ask("pull")
    trainer.ask("publish", version="1.2", seed=1, mib=MIB)
    rollout.ask("slow", pause_s=0.02)
    pulling = rollout.begin("pull", newer_than="1.1", timeout=3.0)
    wait_until(lambda: rollout.landed.value >= 3)
    trainer.kill()
    if rig.config.transport != "shm":
        wait_until(lambda: any(isinstance(event, events.Alarm) for event in rig.events))
    rig.loop.call_soon_threadsafe(rig.service.fence, Identity.parse("trainer/0#1").member, 2)
    if rig.config.transport != "shm":
        assert rollout.end(pulling) is None
        assert rollout.ask("stats")["held"] == ["1.1"]
        assert rollout.ask("pull") == ("1.1", old)
    again = rig.member("trainer/0#2")
    digest, _ = again.ask("publish", version="2.2", seed=1, mib=MIB)
    assert rollout.ask("pull", newer_than="1.2") == ("2.2", digest)
    assert correct(rig, 1)


def test_a_corrupt_chunk_is_counted_and_pulled_elsewhere(rig: Rig) -> None:
    digest = published(rig, 1.0)
    rig.members[1].ask("spoil")
    late = rig.member("rollout/1#1")
    assert late.ask("pull") == ("1.1", digest)
    assert late.ask("stats")["corrupt"] == 1
    assert correct(rig, 2, 1.0)


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_puller_lost_in_mid_pull_harms_nobody_else(rig: Rig, fault: str) -> None:
    trainer = rig.member("trainer/0#1")
    trainer.ask("publish", version="1.1", seed=1, mib=MIB)
    bad = rig.member("rollout/0#1")
    bad.ask("slow", pause_s=0.05)
    bad.begin("pull")
    wait_until(lambda: bad.landed.value >= 2)
    bad.signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    began = time.monotonic()
    digest, _ = trainer.ask("publish", version="1.2", seed=2)
    assert time.monotonic() - began < 1
    for index in (1, 2):
        assert rig.member(f"rollout/{index}#1").ask("pull") == ("1.2", digest)
    assert time.monotonic() - began < 8


def test_an_older_incarnation_is_refused_and_counted(rig: Rig) -> None:
    old = rig.member("trainer/0#1")
    old.ask("publish", version="1.1", seed=1)
    new = rig.member("trainer/0#2")
    digest, _ = new.ask("publish", version="2.1", seed=2)
    with pytest.raises(RemoteFailure, match="FencedError"):
        old.ask("publish", version="1.2", seed=3)
    with pytest.raises(RemoteFailure, match="FencedError"):
        old.ask("reannounce")
    assert rig.service.directory.refused["trainer/0#1"] == 2
    assert [event.identity for event in rig.events if isinstance(event, events.Refused)] == ["trainer/0#1"] * 2
    assert rig.member("rollout/0#1").ask("pull") == ("2.1", digest)


def test_a_source_that_takes_connections_and_never_answers_is_left(rig: Rig) -> None:
    mute = socket.socket(socket.AF_UNIX if rig.config.transport == "shm" else socket.AF_INET)
    try:
        if rig.config.transport == "shm":
            mute.bind("\0robustrl-a-mute-one")
            endpoint = f"{transports.host_key()}/robustrl-a-mute-one"
        else:
            mute.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{mute.getsockname()[1]}"
        mute.listen()
        digest, _ = rig.member("trainer/0#1").ask("publish", version="1.1", seed=1)

        async def announce() -> None:
            rig.service.directory.announce(
                Identity.parse("rollout/8#1"),
                {rig.config.transport: endpoint},
                [Offer(Version(1, 1), digest)],
                origin=False,
            )

        rig.run(announce())
        late = rig.member("rollout/1#1")
        began = time.monotonic()
        assert late.ask("pull") == ("1.1", digest)
        assert 0.9 < time.monotonic() - began < 4
        assert late.ask("stats")["sources"] == [["trainer/0#1"]]
    finally:
        mute.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_transport_serves_nobody_without_the_secret(transport: str) -> None:
    async def main() -> None:
        config = ReconnectConfig(transport=transport)  # type: ignore[arg-type]
        who = Identity.parse("trainer/0#1")
        [server] = transports.make(config, who, Secret(SECRET), "127.0.0.1").values()
        [stranger] = transports.make(config, who, Secret(b"another secret of enough bytes"), "127.0.0.1").values()
        endpoint = await server.serve(lambda digest: None)
        try:
            with pytest.raises(HandshakeRefusedError, match="secret"):
                await stranger.connect(endpoint)
        finally:
            await stranger.close()
            await server.close()
        with pytest.raises(TransportError):
            await server.connect(endpoint)
        await server.close()

    asyncio.run(main())


SCRIPT = """
import asyncio, sys, torch
from robustrl.config import ReconnectConfig
from robustrl.events import ignore
from robustrl.reconnect import *
from robustrl.roles import Identity, Version
from robustrl.wire import Secret
async def main():
    directory = DirectoryService(Directory(), ignore)
    def client(who):
        async def call(method, /, *, timeout=None, **params):
            return await directory.handle(who, method, params)
        return who, DirectoryClient(call), ReconnectConfig(transport=sys.argv[1]), Secret(b"x" * 32), ignore
    trainer = WeightPublisher(*client(Identity.parse("trainer/0#1")))
    rollout = WeightSubscriber(*client(Identity.parse("rollout/0#1")))
    await trainer.start(); await rollout.start()
    await trainer.publish({"a": torch.ones(1 << 20)}, Version(1, 1))
    assert (await rollout.pull(timeout=20)).version == Version(1, 1)
    raise SystemExit(7)
asyncio.run(main())
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_process_that_ends_without_closing_anything_ends_at_once(transport: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, transport], timeout=30, check=False, capture_output=True)
    assert done.returncode == 7, done.stderr.decode()
    assert done.stdout == b""
