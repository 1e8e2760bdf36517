"""One suite for every transport, with real processes: what a weight channel must do when all is well."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from weights_rig import RemoteFailure, Rig, fingerprint, make_tensors

from robustrl.config import ReconnectConfig
from robustrl.reconnect import transports

NEEDS_NIXL = pytest.mark.skipif(not transports.nixl_installed(), reason="needs NIXL (robustrl[nixl])")
TRANSPORTS = [
    "tcp",
    pytest.param("ucx", marks=pytest.mark.skipif(not importlib.util.find_spec("ucxx"), reason="needs ucxx")),
    "shm",
    pytest.param("nixl", marks=NEEDS_NIXL),
]


@pytest.fixture(params=TRANSPORTS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(ReconnectConfig(transport=request.param, chunk_bytes=64 << 10, timeout_s=2.0))
    yield rig
    rig.close()


def test_a_version_arrives_bit_for_bit_although_the_trainer_goes_on(rig: Rig) -> None:
    trainer, rollout = rig.member("trainer/0#1"), rig.member("rollout/0#1")
    digest, _ = trainer.ask("publish", version="1.1", seed=7, mib=3.3, mutate=True)
    assert rollout.ask("pull") == ("1.1", digest)
    loaded, got, _ = rollout.ask("apply", seed=7, mib=3.3)
    assert loaded == digest
    assert got == fingerprint(make_tensors(7, 3.3))
    stats = rollout.ask("stats")
    assert stats["transports"] == [rig.config.transport]
    assert stats["sources"] == [["trainer/0#1"]]
    assert stats["events"] == ["TransportChosen", "VersionCommitted"]


def test_a_late_joiner_pulls_from_a_relay_and_costs_the_trainer_nothing(rig: Rig) -> None:
    trainer, first = rig.member("trainer/0#1"), rig.member("rollout/0#1")
    digest, size = trainer.ask("publish", version="1.1", seed=1)
    first.ask("pull")
    before = trainer.ask("stats")["served"]
    late = rig.member("rollout/1#1")
    assert late.ask("pull") == ("1.1", digest)
    assert late.ask("stats")["sources"] == [["rollout/0#1"]]
    assert trainer.ask("stats")["served"] == before
    assert first.ask("stats")["served"] >= size * 0.9
    trainer.kill()
    last = rig.member("rollout/2#1")
    assert last.ask("pull") == ("1.1", digest)
    _, got, _ = last.ask("apply", seed=1)
    assert got == fingerprint(make_tensors(1))


def test_versions_follow_each_other_and_only_the_newest_stay(rig: Rig) -> None:
    trainer, rollout = rig.member("trainer/0#1"), rig.member("rollout/0#1")
    descriptors = []
    for step in range(1, 10):
        trainer.ask("publish", version=f"1.{step}", seed=step)
        assert rollout.ask("pull", newer_than=f"1.{step - 1}")[0] == f"1.{step}"
        descriptors.append([member.ask("stats")["descriptors"] for member in (trainer, rollout)])
    assert sum(descriptors[-1]) <= sum(descriptors[4]) + 2  # when all buffers that are used in turn were there
    assert rollout.ask("pull", newer_than="1.9", timeout=0.2) is None
    assert trainer.ask("stats")["held"] == ["1.8", "1.9"]
    assert rollout.ask("stats")["held"] == ["1.8", "1.9"]
    assert rollout.ask("pull", step=8)[0] == "1.8"


def test_a_pull_waits_for_what_is_not_published_yet(rig: Rig) -> None:
    trainer, rollout = rig.member("trainer/0#1"), rig.member("rollout/0#1")
    waiting = rollout.begin("pull", step=2)
    trainer.ask("publish", version="1.1", seed=1)
    digest, _ = trainer.ask("publish", version="1.2", seed=2)
    assert rollout.end(waiting) == ("1.2", digest)


def test_what_does_not_fit_is_named_and_nothing_is_touched(rig: Rig) -> None:
    trainer, rollout = rig.member("trainer/0#1"), rig.member("rollout/0#1")
    trainer.ask("publish", version="1.1", seed=3)
    rollout.ask("pull")
    for change, tensor in (("shape", "bf16"), ("dtype", "int8"), ("name", "fp16")):
        with pytest.raises(RemoteFailure, match=f"WeightMismatchError.*'{tensor}'"):
            rollout.ask("apply", seed=3, change=change)
    _, got, changed = rollout.ask("apply", seed=3)
    assert changed
    assert got == fingerprint(make_tensors(3))


def test_the_same_weights_under_a_higher_attempt_are_not_pulled_again(rig: Rig) -> None:
    trainer, rollout = rig.member("trainer/0#1"), rig.member("rollout/0#1")
    digest, _ = trainer.ask("publish", version="1.5", seed=5)
    rollout.ask("pull")
    trainer.kill()
    again = rig.member("trainer/0#2")
    assert again.ask("publish", version="2.5", seed=5)[0] == digest
    before = rollout.ask("stats")["pulled"]
    assert rollout.ask("pull", newer_than="1.5") == ("2.5", digest)
    assert rollout.ask("stats")["pulled"] == before
    assert again.ask("stats")["served"] == 0


def test_holders_tell_a_directory_that_was_restarted_empty(rig: Rig) -> None:
    trainer, rollout = rig.member("trainer/0#1"), rig.member("rollout/0#1")
    digest, _ = trainer.ask("publish", version="1.1", seed=1)
    trainer.ask("publish", version="1.2", seed=2)
    rollout.ask("pull", step=1)
    rig.lose_directory()
    rig.host_directory()
    late = rig.member("rollout/1#1")
    waiting = late.begin("pull", step=1)
    rollout.ask("reannounce")
    trainer.ask("reannounce")
    assert late.end(waiting) == ("1.1", digest)
    assert late.ask("pull", newer_than="1.1")[0] == "1.2"
    assert trainer.ask("publish", version="1.3", seed=3)


def test_a_member_ends_by_itself_and_leaves_nothing(rig: Rig) -> None:
    segments = set(Path("/dev/shm").iterdir())
    trainer, rollout = rig.member("trainer/0#1"), rig.member("rollout/0#1")
    trainer.ask("publish", version="1.1", seed=1)
    rollout.ask("pull")
    for member in (rollout, trainer):
        member.ask("close")
        member.process.join(5)
        assert member.process.exitcode == 0
    assert not [name for name in set(Path("/dev/shm").iterdir()) - segments if "robustrl" in name.name]
    assert rig.service.directory.newest() is None


def test_a_member_with_a_wrong_secret_is_refused_at_once(rig: Rig) -> None:
    stranger = rig.member("rollout/9#1", secret=b"quite another secret, just as long")
    with pytest.raises(RemoteFailure, match="HandshakeRefusedError"):
        stranger.ask("pull", timeout=5.0)


def test_closing_ends_a_pull_that_waits(rig: Rig) -> None:
    rollout = rig.member("rollout/0#1")
    waiting = rollout.begin("pull")
    rollout.ask("close")
    assert rollout.end(waiting) is None
    rollout.process.join(5)
    assert rollout.process.exitcode == 0
