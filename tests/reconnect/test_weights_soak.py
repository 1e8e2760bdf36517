"""Hundreds of publications while the publisher, relays and subscribers are killed, stopped and restarted at random."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from weights_rig import Driven, MemberProcess, RemoteFailure, Rig, descriptors, fingerprint, wait_until

from robustrl.config import ReconnectConfig
from robustrl.roles import Identity, Member, Version

PUBLICATIONS = int(os.environ.get("ROBUSTRL_SOAK_PUBLICATIONS", "150"))
"""`make soak` runs 500; each publication costs about a tenth of a second."""
SUBSCRIBERS = 4
PEER_LIMIT_S = 0.5
PULL_LIMIT_S = 8.0
CATCH_UP_S = 20.0
"""A subscriber that runs has the newest version after this time, whatever happens to the others."""
WARM = 60
"""Publications before the start values are taken."""
GROWTH_BYTES = 24 << 20
NEEDS_UCX = pytest.mark.skipif(not importlib.util.find_spec("ucxx"), reason="needs ucxx")


def weights(version: Version) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version.attempt * 100_000 + version.step)
    return {
        "first": torch.randn(24_000, generator=generator),
        "second": torch.randn(300, 40, generator=generator).to(torch.bfloat16).t(),
        "fixed": torch.ones(4_000),
    }


class Publisher(Driven):
    async def publish_weights(self, version: str) -> str:
        parsed = Version.parse(version)
        tensors = weights(parsed)
        done = await self.weights.publish(tensors, parsed)
        for tensor in tensors.values():
            tensor.zero_()
        return str(done.digest)


class Resources(NamedTuple):
    descriptors: int
    versions_bytes: int
    """Memory of weight versions: memfds that are open."""
    resident: int


class Subscriber(Driven):
    """Follows the newest version and writes down what it loaded, in a file that outlives it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.live = {name: torch.zeros_like(tensor) for name, tensor in weights(Version(0, 0)).items()}
        self.tasks: list[asyncio.Task[None]] = []

    async def follow(self, path: str) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(self._follow(path)))

    async def _follow(self, path: str) -> None:
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        newest: Version | None = None
        while True:
            began = time.monotonic()
            held = await self.weights.pull(newest, timeout=PULL_LIMIT_S)
            said: dict[str, Any] = {"who": str(self.identity), "seconds": time.monotonic() - began}
            if held is not None:
                newest = held.version
                said |= {"version": str(held.version), "digest": self.weights.apply(held, self.live)}
                said["live"] = fingerprint(self.live)
            os.write(log, json.dumps(said).encode() + b"\n")

    async def resources(self) -> Resources:
        return used()


def used() -> Resources:
    """What this process holds."""
    versions = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "memfd:robustrl-weights" in str(entry.readlink()):
                versions += entry.stat().st_size
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Resources(descriptors(), versions, resident)


class Soak:
    """Draws faults, applies them, and keeps count of who should be doing what."""

    def __init__(self, rig: Rig, path: Path, seed: int) -> None:
        self.rig = rig
        self.path = path
        self.random = random.Random(seed)
        self.digests: dict[str, str] = {}
        """By version, as the publisher said when it published."""
        self.faults: Counter[str] = Counter()
        self.attempt = 1
        self.publisher = rig.member("trainer/0#1", kind=Publisher)
        self.incarnations = [0] * SUBSCRIBERS
        self.subscribers: list[MemberProcess] = []
        self.wake_at: dict[int, int] = {}
        """When a stopped subscriber goes on: publication by subscriber."""
        self.were_stopped: set[str] = set()
        for index in range(SUBSCRIBERS):
            self.subscribers.append(self.start(index))

    def start(self, index: int) -> MemberProcess:
        self.incarnations[index] += 1
        identity = Identity(Member("rollout", index), self.incarnations[index])
        self.rig.call(lambda: self.rig.service.fence(identity.member, identity.incarnation))
        member = self.rig.member(str(identity), kind=Subscriber)
        member.begin("follow", path=str(self.path))
        return member

    def lose(self, member: MemberProcess) -> None:
        member.kill()
        member.process.close()
        self.rig.members.remove(member)

    def publish(self, step: int) -> None:
        version = f"{self.attempt}.{step}"
        self.digests[version] = self.publisher.end(self.publisher.begin("publish_weights", version=version), 10.0)

    def replace_publisher(self) -> MemberProcess:
        """A successor takes over; the predecessor is returned as it is."""
        before = self.publisher
        self.attempt += 1
        self.rig.call(lambda: self.rig.service.fence(Member("trainer"), self.attempt))
        self.publisher = self.rig.member(f"trainer/0#{self.attempt}", kind=Publisher)
        return before

    def step(self, step: int) -> None:
        for index in [index for index, wake in self.wake_at.items() if wake <= step]:
            del self.wake_at[index]
            self.subscribers[index].signal(signal.SIGCONT)
        kinds = ["none", "kill", "stop", "leave", "kill publisher", "kill publishing", "zombie publisher"]
        [fault] = self.random.choices(kinds, weights=[84, 6, 5, 1, 1, 1, 2])
        # Subscriber 0 is stopped and never killed: it shows what 500 versions leave behind in one process.
        running = [index for index in range(1, SUBSCRIBERS) if index not in self.wake_at]
        if fault in {"kill", "leave"} and not running:
            fault = "none"
        if fault == "stop" and len(self.wake_at) >= 2:
            fault = "none"
        self.faults[fault] += 1
        match fault:
            case "kill":
                index = self.random.choice(running)
                self.lose(self.subscribers[index])
                self.subscribers[index] = self.start(index)
            case "leave":
                index = self.random.choice(running)
                self.subscribers[index].ask("close")
                self.lose(self.subscribers[index])
                self.subscribers[index] = self.start(index)
            case "stop":
                index = self.random.choice([index for index in range(SUBSCRIBERS) if index not in self.wake_at])
                self.subscribers[index].signal(signal.SIGSTOP)
                self.were_stopped.add(self.subscribers[index].who)
                self.wake_at[index] = step + self.random.randint(1, 20)
            case "kill publisher":
                self.lose(self.replace_publisher())
            case "kill publishing":
                version = f"{self.attempt}.{step}"
                self.publisher.begin("publish_weights", version=version)
                time.sleep(self.random.uniform(0, 0.02))  # the fault's moment, not a condition
                self.lose(self.replace_publisher())
            case "zombie publisher":
                self.publisher.signal(signal.SIGSTOP)
                zombie = self.replace_publisher()
                self.publish(step)
                zombie.signal(signal.SIGCONT)
                with pytest.raises(RemoteFailure, match="FencedError"):
                    zombie.ask("publish_weights", version=f"{self.attempt - 1}.{step + 1}")
                self.lose(zombie)
                return
        self.publish(step)

    def commits(self) -> list[dict[str, Any]]:
        """Whole lines only: the last may be on its way."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_bytes().rpartition(b"\n")[0].splitlines()]

    def catch_up(self) -> None:
        """Waits until everyone who runs has the newest version."""
        newest = list(self.digests)[-1]
        waiting = {member.who for index, member in enumerate(self.subscribers) if index not in self.wake_at}
        wait_until(
            lambda: waiting <= {line["who"] for line in self.commits() if line.get("version") == newest}, CATCH_UP_S
        )

    def wake_all(self) -> None:
        for index in list(self.wake_at):
            del self.wake_at[index]
            self.subscribers[index].signal(signal.SIGCONT)

    def resources(self) -> tuple[Resources, Resources]:
        """Of the process of the test, which hosts the directory, and of the subscriber that is never killed."""
        return used(), Resources(*self.subscribers[0].ask("resources"))


@pytest.fixture(params=["tcp", pytest.param("ucx", marks=NEEDS_UCX), "shm"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(ReconnectConfig(transport=request.param, chunk_bytes=16 << 10, timeout_s=PEER_LIMIT_S))
    yield rig
    rig.close()


def check(soak: Soak) -> None:
    latest: dict[str, Version] = {}
    fingerprints: dict[str, dict[str, str]] = {}
    for line in soak.commits():
        who = line["who"]
        if who not in soak.were_stopped:
            assert line["seconds"] < PULL_LIMIT_S + 2.0
        if "version" not in line:
            continue
        version = Version.parse(line["version"])
        assert who not in latest or version > latest[who], f"{who} went from {latest[who]} to {version}"
        latest[who] = version
        # A version whose publisher was killed before it answered is known by its content alone.
        assert line["digest"] == soak.digests.setdefault(line["version"], line["digest"])
        if line["version"] not in fingerprints:
            fingerprints[line["version"]] = fingerprint(weights(version))
        assert line["live"] == fingerprints[line["version"]], f"{who} loaded something else as {version}"


@pytest.mark.slow
def test_publications_under_random_kills_stops_and_restarts(rig: Rig, tmp_path: Path) -> None:
    soak = Soak(rig, tmp_path / "commits", seed=20261201)
    start: tuple[Resources, Resources] | None = None
    for step in range(1, PUBLICATIONS + 1):
        soak.step(step)
        if step % 10 == 0:
            soak.catch_up()
        if step >= WARM and start is None and 0 not in soak.wake_at:
            soak.catch_up()
            start = soak.resources()
    soak.wake_all()
    soak.catch_up()
    assert start is not None
    check(soak)
    assert len(soak.digests) >= PUBLICATIONS
    assert min(soak.faults[kind] for kind in ("kill", "stop", "kill publisher", "zombie publisher")) >= 1, soak.faults
    committed = [line for line in soak.commits() if "version" in line]
    assert len(committed) > PUBLICATIONS / 5

    for before, after in zip(start, soak.resources(), strict=True):
        assert after.descriptors <= before.descriptors + 4, (before, after)
        assert after.versions_bytes <= before.versions_bytes, (before, after)
        assert after.resident <= before.resident + GROWTH_BYTES, (before, after)
    for member in [Member("rollout", index) for index in range(SUBSCRIBERS)]:
        assert rig.call(lambda member=member: rig.service.directory.places(member)) == []
