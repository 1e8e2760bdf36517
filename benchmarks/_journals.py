"""Where generated tokens are kept: robustrl's ledger, JSON lines with an fsync each, and a Ray actor's memory.

Each writer has a number of trajectories under way and adds one token to each in turn, as an engine's steps do. What a
way has been told to keep is asked for every `FLUSH_TOKENS` tokens of a trajectory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from _actors import PRIVATE, Actor
from _private_ray import PrivateRay
from _ray_journal import RayJournal, RayWriter

from robustrl.config import PersistConfig
from robustrl.persist import LeaseGrant, Ledger, LedgerClient, LedgerService, Store
from robustrl.roles import Identity, Member
from robustrl.wire import Address, RpcClient, RpcServer, Secret, bind

SECRET = Secret(b"a secret for benchmarks on loopback")
FLUSH_TOKENS = 16


class Journal(Protocol):
    def run(self, seconds: float) -> list[tuple[int, float]]:
        """Lets all writers write; each says (tokens kept, seconds)."""
        ...

    def bytes(self) -> int:
        """What lies on the disk."""
        ...

    def close(self) -> None: ...


class LedgerHost:
    """The ledger's server process."""

    async def start(self, path: str, samples: int) -> tuple[str, int]:
        ledger = Ledger(
            Store(path),
            lambda index: b"%d" % index,
            groups_per_batch=1,
            samples_per_prompt=samples,
            total_steps=1 << 20,
            config=PersistConfig(staleness=1 << 20),
        )
        service = LedgerService(ledger)
        self.server = RpcServer(service.handle, SECRET, bind())
        await self.server.start()
        return self.server.address.host, self.server.address.port


class LedgerMember:
    """A writer: leases a group of `samples` answers and generates them, one token of each at a time."""

    def __init__(self, index: int, address: tuple[str, int]) -> None:
        me = Identity(Member("rollout", index), 1)
        self.ledger = LedgerClient(RpcClient(lambda: Address(*address), me, SECRET).call)

    async def start(self) -> None:
        await self.ledger.start()

    async def write(self, seconds: float, length: int) -> tuple[int, float]:
        began = time.monotonic()
        tokens = 0
        while time.monotonic() - began < seconds:
            grant = await self.ledger.lease([1 << 20])
            assert isinstance(grant, LeaseGrant)
            writer = self.ledger.writer(grant)
            tokens += await asyncio.to_thread(self._generate, writer, len(grant.samples), length, began + seconds)
        await self.ledger.flush()
        return tokens, time.monotonic() - began

    def _generate(self, writer: Any, samples: int, length: int, until: float) -> int:
        for position in range(length):
            if position % FLUSH_TOKENS == 0 and time.monotonic() > until:
                return position * samples
            for sample in range(samples):
                writer.append(sample, position, -1.0, "1.0")
        for sample in range(samples):
            writer.finish(sample, 1.0, "length")
        return length * samples


class FileJournal:
    """A journal on the disk, in a folder of its own. Subclasses set `actors` and `members`, who write."""

    actors: list[Actor]
    members: list[Actor]

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rrbench-"))
        self.task: dict[str, int] = {}
        """What each turn's `write` is told beside its time."""

    def run(self, seconds: float) -> list[tuple[int, float]]:
        for member in self.members:
            member.begin("write", seconds=seconds, **self.task)
        return [member.end() for member in self.members]

    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def close(self) -> None:
        for actor in self.actors:
            actor.close()
        shutil.rmtree(self.folder)


class LedgerJournal(FileJournal):
    def __init__(self, writers: int, trajectories: int, length: int) -> None:
        super().__init__()
        self.task = {"length": length}
        host = Actor(LedgerHost)
        address = host.ask("start", path=str(self.folder / "ledger.db"), samples=trajectories)
        self.members = [Actor(LedgerMember, index, address) for index in range(writers)]
        self.actors = [*self.members, host]
        for member in self.members:
            member.ask("start")


class LinesMember:
    """A writer with a file of its own: a record of JSON for each trajectory's new tokens, and an fsync for each."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, seconds: float, trajectories: int) -> tuple[int, float]:
        began = time.monotonic()
        tokens = start = 0
        while time.monotonic() - began < seconds:
            ids = list(range(start, start + FLUSH_TOKENS))
            for sample in range(trajectories):
                record = {"sample": sample, "start": start, "ids": ids, "logprobs": [-1.0] * FLUSH_TOKENS}
                os.write(self.file, json.dumps(record | {"version": "1.0"}).encode() + b"\n")
                os.fsync(self.file)
                tokens += FLUSH_TOKENS
                if time.monotonic() - began > seconds:
                    break
            start += FLUSH_TOKENS
        return tokens, time.monotonic() - began


class LinesJournal(FileJournal):
    def __init__(self, writers: int, trajectories: int) -> None:
        super().__init__()
        self.task = {"trajectories": trajectories}
        self.members = self.actors = [
            Actor(LinesMember, str(self.folder / f"{index}.jsonl")) for index in range(writers)
        ]


class RayDriver(PrivateRay):
    """The journal's actor and its writers."""

    def begin(self, **arguments: Any) -> None:
        remote = self.ray.remote(num_cpus=0)
        journal = remote(RayJournal).remote()
        self.writers = [remote(RayWriter).remote(journal) for _ in range(arguments["writers"])]
        self.ray.get([writer.ready.remote() for writer in self.writers], timeout=90)

    def run(self, seconds: float, trajectories: int) -> list[tuple[int, float]]:
        asked = [writer.write.remote(seconds, trajectories, FLUSH_TOKENS) for writer in self.writers]
        return list(self.ray.get(asked, timeout=seconds + 90))


class ActorJournal:
    """Pickles in the memory of a Ray actor: what is written is gone with that actor."""

    def __init__(self, writers: int, trajectories: int) -> None:
        self.trajectories = trajectories
        self.driver = Actor(RayDriver, namespace=PRIVATE)
        self.driver.ask("start", store_bytes=256 << 20, writers=writers)

    def run(self, seconds: float) -> list[tuple[int, float]]:
        found: list[tuple[int, float]] = self.driver.ask("run", seconds=seconds, trajectories=self.trajectories)
        return found

    def bytes(self) -> int:
        return 0

    def close(self) -> None:
        with contextlib.suppress(RuntimeError, TimeoutError, OSError):
            self.driver.ask("stop")
        self.driver.close()


def fill(path: Path, trajectories: int, tokens: int, in_flight: int, group: int) -> Iterator[int]:
    """Fills a ledger with so many trajectories, the last `in_flight` of them not finished. Yields progress."""
    done = (trajectories - in_flight) // group
    ledger = Ledger(
        Store(path),
        lambda index: b"%d" % index,
        groups_per_batch=1,
        samples_per_prompt=group,
        total_steps=1 << 20,
        config=PersistConfig(staleness=1 << 20),
    )
    rollout, trainer = Identity(Member("rollout"), 1), Identity(Member("trainer"), 1)
    ids, logprobs = list(range(tokens)), [-1.0] * tokens
    for number in range(trajectories // group):
        with ledger.deferred():
            grant = ledger.lease(rollout, [1 << 20])
            assert isinstance(grant, LeaseGrant)
            for sample in range(group):
                place = (rollout, grant.group, sample)
                ledger.append(*place, attempt=1, start=0, ids=ids, logprobs=logprobs, version="1.0")
                if number < done:
                    ledger.finish(*place, attempt=1, tokens=tokens, reward=1.0)
            if number < done:
                ledger.next_batch(trainer, number + 1)
                ledger.commit(trainer, number + 1)
        if number % 100 == 99:
            ledger.flush()
            yield number * group
    ledger.flush()
    ledger._store.close()


def reopen(path: Path, group: int) -> tuple[float, float, int]:
    """(seconds to open, seconds to hand out all that was under way to others, trajectories handed out)."""
    began = time.monotonic()
    store = Store(path)
    ledger = Ledger(
        store,
        lambda index: None,
        groups_per_batch=1,
        samples_per_prompt=group,
        total_steps=1 << 20,
        config=PersistConfig(staleness=1 << 20),
    )
    opened = time.monotonic()
    ledger.release_owner(Member("rollout"), 2)
    other, given = Identity(Member("rollout", 1), 1), 0
    while isinstance(grant := ledger.lease(other, [1 << 20]), LeaseGrant):
        given += len(grant.samples)
    done = time.monotonic()
    store.close()
    return opened - began, done - opened, given
