"""Relays that give on what they have not got whole yet: one chain, each link carries the version once."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from weights_rig import Driven, MemberProcess, Rig, wait_until

from robustrl import events
from robustrl.config import ReconnectConfig
from robustrl.reconnect.transports import tcp
from robustrl.roles import Member

NEEDS_UCX = pytest.mark.skipif(not importlib.util.find_spec("ucxx"), reason="needs ucxx")
NEEDS_NIXL = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13")), reason="needs NIXL"
)
MIB = 4.0
RECEIVERS = 4
ROLLOUTS = [Member("rollout", index) for index in range(RECEIVERS)]


@pytest.fixture(params=["tcp", pytest.param("ucx", marks=NEEDS_UCX), pytest.param("nixl", marks=NEEDS_NIXL)])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(ReconnectConfig(transport=request.param, chunk_bytes=64 << 10, timeout_s=4.0, credits=1))
    yield rig
    rig.close()


class Unbuffered(Driven):
    """What is in the sockets' buffers would reach a puller after its source has died."""

    def __init__(self, *args: Any) -> None:
        tcp.SOCKET_BUFFER = 64 << 10
        super().__init__(*args)


def slow_chain(rig: Rig) -> tuple[MemberProcess, list[MemberProcess], str, list[int]]:
    """A trainer with a version, and receivers that are all in the middle of pulling it, one from the other."""
    trainer = rig.member("trainer/0#1", kind=Unbuffered)
    digest, _ = trainer.ask("publish", version="1.1", seed=1, mib=MIB)
    receivers = [rig.member(f"rollout/{index}#1", kind=Unbuffered) for index in range(RECEIVERS)]
    pulls = []
    for receiver in receivers:
        receiver.ask("hold")
        pulls.append(receiver.begin("pull", timeout=60.0))
        wait_until(lambda receiver=receiver: receiver.landed.value >= 2)
    return trainer, receivers, digest, pulls


def go_on(receivers: list[MemberProcess]) -> None:
    for receiver in receivers:
        receiver.gate.set()


def places(rig: Rig) -> dict[str, str]:
    directory = rig.service.directory
    found: list[Any] = rig.call(lambda: [pair for who in ROLLOUTS for pair in directory.places(who)])
    return {str(puller): str(source) for puller, source in found}


def test_the_trainer_gives_a_version_once_and_each_receiver_gives_it_on_while_it_pulls(rig: Rig) -> None:
    trainer, receivers, digest, pulls = slow_chain(rig)
    assert places(rig) == {
        "rollout/0#1": "trainer/0#1",
        "rollout/1#1": "rollout/0#1",
        "rollout/2#1": "rollout/1#1",
        "rollout/3#1": "rollout/2#1",
    }
    go_on(receivers)
    for receiver, pull in zip(receivers, pulls, strict=True):
        assert receiver.end(pull) == ("1.1", digest)
    size = receivers[0].ask("stats")["pulled"]
    assert trainer.ask("stats")["served"] == size
    assert [receiver.ask("stats")["served"] for receiver in receivers] == [size, size, size, 0]
    for receiver in receivers:
        loaded, live, _ = receiver.ask("apply", seed=1, mib=MIB)
        assert loaded == digest
        assert live == receivers[0].ask("apply", seed=1, mib=MIB)[1]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_lost_link_of_the_chain_costs_those_behind_it_no_byte_twice(rig: Rig, fault: int) -> None:
    _, receivers, digest, pulls = slow_chain(rig)
    os.kill(receivers[1].pid, fault)
    go_on(receivers)
    for index in (0, 2, 3):
        assert receivers[index].end(pulls[index]) == ("1.1", digest)
    size = receivers[0].ask("stats")["pulled"]
    for index in (2, 3):
        assert receivers[index].ask("stats")["pulled"] == size
    told = [event.text for event in rig.events if isinstance(event, events.Alarm)]
    assert any("rollout/2#1 in phase sync gave up source rollout/1#1" in text for text in told)
    # Only who pulled from the lost one blames it; nobody blames someone who merely waited as well.
    assert not any("gave up source rollout/2#1" in text or "gave up source rollout/0#1" in text for text in told)


def test_a_chain_whose_trainer_is_lost_drops_the_half_version_and_takes_the_next(rig: Rig) -> None:
    trainer, receivers, _, pulls = slow_chain(rig)
    os.kill(trainer.pid, signal.SIGKILL)
    rig.call(lambda: rig.service.fence(Member("trainer"), 2))
    go_on(receivers)
    successor = rig.member("trainer/0#2")
    later, _ = successor.ask("publish", version="2.1", seed=2, mib=MIB)
    for receiver, pull in zip(receivers, pulls, strict=True):
        assert receiver.end(pull) == ("2.1", later)
        assert receiver.ask("stats")["held"] == ["2.1"]
