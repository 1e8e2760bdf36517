"""V7: a receiver killed after 3 of 10 buckets, a receiver frozen after 3 of 10, and peers that never say hello."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest
from weights_fleet import PEER_LIMIT_S, Fleet, Worker, loaded
from weights_rig import RemoteFailure, Rig, wait_until

from robustrl import events
from robustrl.reconnect.directory import Offer
from robustrl.reconnect.transports import host_key
from robustrl.roles import Identity, Version


def alarms(rig: Rig, who: str) -> list[str]:
    return [event.text for event in rig.events if isinstance(event, events.Alarm) and who in event.text]


@pytest.mark.parametrize(("fault", "limit"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 2.5)], ids=["kill", "stop"])
def test_a_receiver_lost_at_bucket_3_costs_nobody_else_anything(rig: Rig, fault: int, limit: float) -> None:
    fleet = Fleet(rig)
    first, second, third = fleet.workers
    second.ask("slow", pause_s=0.1)
    began = time.monotonic()
    digest = fleet.publish("1.2", 2)
    assert time.monotonic() - began < 1.0  # the trainer's own wait: its copy
    pulling = {worker: worker.begin("sync", newer_than="1.1") for worker in fleet.workers}
    wait_until(lambda: second.landed.value >= 3)
    second.signal(fault)
    lost = time.monotonic()
    # The next step starts and ends on time: the sender answers at once and publishes again.
    fleet.trainer.ask("stats")
    assert time.monotonic() - lost < limit
    for worker in (first, third):
        assert worker.end(pulling[worker]) == ("1.2", digest)
        assert loaded(worker, 2)
    began = time.monotonic()
    later = fleet.publish("1.3", 3)
    assert time.monotonic() - began < 1.0
    assert second.landed.value < 10
    fleet.fence("rollout/1#2")  # the verdict; it takes the receiver out
    assert "rollout/1#1" not in fleet.holders("1.2") + fleet.holders("1.1")
    assert any("in phase sync was lost while it pulled" in text for text in alarms(rig, "rollout/1#1"))
    for worker in (first, third):
        assert worker.ask("sync", newer_than="1.2") == ("1.3", later)
        assert loaded(worker, 3)

    recovered = rig.member("rollout/1#2", kind=Worker)
    assert recovered.ask("sync") == ("1.3", later)
    assert loaded(recovered, 3)
    assert recovered.ask("stats")["pulled"] >= 10 << 20  # a full transfer
    if fault == signal.SIGSTOP:  # its predecessor wakes up and may not go on
        second.signal(signal.SIGCONT)
        with pytest.raises(RemoteFailure, match="FencedError"):
            second.end(pulling[second])
        assert second.ask("health")["version"] == "1.1"


def mute_socket(transport: str, number: int) -> tuple[socket.socket, str]:
    """A socket that takes connections and never answers, and the endpoint that leads to it."""
    if transport == "shm":
        mute = socket.socket(socket.AF_UNIX)
        mute.bind(f"\0robustrl-mute-{number}-{time.monotonic_ns()}")
        endpoint = f"{host_key()}/{mute.getsockname()[1:].decode()}"
    else:
        mute = socket.socket(socket.AF_INET)
        mute.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{mute.getsockname()[1]}"
    mute.listen()
    return mute, endpoint


def test_a_source_that_never_answers_the_hello_costs_its_limit_and_is_named(rig: Rig) -> None:
    fleet = Fleet(rig)
    digest = fleet.publish("1.2", 2)
    mute, endpoint = mute_socket(rig.config.transport, 1)
    with mute:
        ghost = Identity.parse("rollout/8#1")
        offer = Offer(Version(1, 2), digest, 10 << 20)
        rig.call(lambda: rig.service.directory.announce(ghost, {rig.config.transport: endpoint}, [offer], origin=False))
        began = time.monotonic()
        pulling = [(worker, worker.begin("sync", newer_than="1.1")) for worker in fleet.workers]
        for worker, number in pulling:
            assert worker.end(number) == ("1.2", digest)
            assert loaded(worker, 2)
        assert time.monotonic() - began < PEER_LIMIT_S + 2.5
        told = alarms(rig, "rollout/8#1")
        assert told
        assert all("in phase sync gave up source rollout/8#1 before the manifest" in text for text in told)


def dial(endpoint: str) -> socket.socket:
    if "/" in endpoint:
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect("\0" + Path(endpoint).name)
    else:
        host, _, port = endpoint.rpartition(":")
        stranger = socket.create_connection((host, int(port)))
    return stranger


def test_receivers_that_connect_and_never_say_hello_hold_nobody_up(rig: Rig) -> None:
    fleet = Fleet(rig)
    holder = rig.call(lambda: rig.service.directory.assign(Identity.parse("rollout/9#1"), Version(1, 1), 0.0))
    strangers = [dial(holder.endpoints[rig.config.transport]) for _ in range(5)]
    try:
        connected = time.monotonic()
        digest = fleet.publish("1.2", 2)
        assert time.monotonic() - connected < 1.0
        for worker in fleet.workers:
            assert worker.ask("sync", newer_than="1.1") == ("1.2", digest)
        for stranger in strangers:  # each is let go at the limit
            stranger.settimeout(max(connected + PEER_LIMIT_S + 0.5 - time.monotonic(), 0.01))
            while stranger.recv(4096):
                pass
    finally:
        for stranger in strangers:
            stranger.close()
    source = next(member for member in rig.members if member.who == str(holder.source))
    assert any("let a stranger go" in line and "in phase sync" in line for line in source.ask("log"))
