"""The process that writes the ledger is killed 200 times: at each statement of a commit, and at random moments."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from robustrl.config import PersistConfig
from robustrl.persist import Batch, LeaseGrant, Ledger, Store, reading
from robustrl.persist.store import Rows
from robustrl.roles import Identity, Member

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["robustrl.persist"])
B, N, STEPS, LENGTH = 2, 2, 10_000, 6


def token(group: int, sample: int, position: int) -> int:
    return group * 1000 + sample * 100 + position


class Deadly:
    """A database connection whose process is killed just before, or just after, the `statement`-th one."""

    def __init__(self, database: Any, statement: int, after: bool) -> None:
        self._database = database
        self._left = statement
        self._after = after

    def execute(self, *arguments: Any) -> Any:
        self._left -= 1
        if self._left == 0 and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        done = self._database.execute(*arguments)
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)


def write(path: Path, life: int, acks: Connection, statement: int, after: bool) -> None:
    """Generates, trains and commits until it is killed; says on `acks` what it was told is kept."""
    store = Store(path)
    ledger = Ledger(
        store,
        lambda index: b"%d" % index,
        groups_per_batch=B,
        samples_per_prompt=N,
        total_steps=STEPS,
        config=PersistConfig(staleness=STEPS, max_barren_attempts=10_000),
    )
    if statement:
        store._database = Deadly(store._database, statement, after)  # type: ignore[assignment]
    rollout, trainer = Identity(Member("rollout"), life), Identity(Member("trainer"), life)

    def say(*words: object) -> None:
        acks.send_bytes(" ".join(map(str, words)).encode())

    ledger.rewind(trainer, ledger.committed)
    step = ledger.committed
    while True:
        grant = ledger.lease(rollout, [STEPS])
        assert isinstance(grant, LeaseGrant)
        for sample in grant.samples:
            if sample.finished:
                continue
            for at in range(sample.tokens, LENGTH):
                place = {"attempt": grant.attempt, "start": at, "version": "1.0"}
                one = token(grant.group, sample.sample, at)
                ledger.append(rollout, grant.group, sample.sample, ids=[one], logprobs=[-1.0], **place)  # type: ignore[arg-type]
                say("tokens", grant.group, sample.sample, at + 1)
            ledger.finish(
                rollout, grant.group, sample.sample, attempt=grant.attempt, tokens=LENGTH, reward=float(grant.group)
            )
            say("answer", grant.group, sample.sample)
        if isinstance(ledger.next_batch(trainer, step + 1), Batch):
            step += 1
            say("consumed", step)
            ledger.commit(trainer, step)
            say("committed", step)


class Promises:
    """What the killed writers had been told is kept."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, int], int] = {}
        self.answers: set[tuple[int, int]] = set()
        self.committed = 0

    def hear(self, said: bytes) -> None:
        kind, *numbers = said.decode().split()
        first, *rest = map(int, numbers)
        if kind == "tokens":
            self.tokens[first, rest[0]] = rest[1]
        elif kind == "answer":
            self.answers.add((first, rest[0]))
        elif kind == "committed":
            self.committed = first

    def check(self, path: Path) -> None:
        """Raises AssertionError unless the file keeps them, as it was left behind."""
        rows = Rows.open(path)
        low = max(0, self.committed - 3) * B
        held: dict[tuple[int, int], list[int]] = {}
        for group, sample, start, ids, *_ in rows.rows("segments", "grp >= ?", low):
            there = held.setdefault((group, sample), [])
            assert start == len(there)
            there += [int.from_bytes(ids[at : at + 4], "little") for at in range(0, len(ids), 4)]
        states = {(group, sample): state for group, sample, state, *_ in rows.rows("samples")}
        committed = dict(rows.rows("meta"))["committed"] if self.committed else 0
        assert rows.damaged == []
        rows.close()
        assert committed >= self.committed
        for place, tokens in self.tokens.items():
            if place[0] >= low:
                assert len(held.get(place, [])) >= tokens, f"tokens of {place} were acknowledged and are gone"
        for place, tokens_there in held.items():
            assert tokens_there == [token(*place, at) for at in range(len(tokens_there))]
        for place in self.answers:
            assert states[place] in ("finished", "consumed", "committed")


def die(
    path: Path, life: int, promises: Promises, *, statement: int = 0, after: bool = False, pause_s: float = 0
) -> None:
    """One life of the writer: killed at a statement of its own, or `pause_s` after its first word was kept."""
    ours, theirs = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=write, args=(path, life, theirs, statement, after))
    process.start()
    theirs.close()
    with contextlib.suppress(EOFError):
        promises.hear(ours.recv_bytes())
        if not statement:
            time.sleep(pause_s)  # the moment of the fault, not a condition
            process.kill()
        while True:
            promises.hear(ours.recv_bytes())
    ours.close()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL
    process.close()


@pytest.mark.parametrize("when", ["at each statement of a commit", "at random moments"])
def test_a_writer_that_is_killed_again_and_again_loses_nothing_that_it_acknowledged(tmp_path: Path, when: str) -> None:
    path, promises, chance = tmp_path / "ledger.db", Promises(), random.Random(6)
    for life in range(1, 101):
        if when == "at random moments":
            die(path, life, promises, pause_s=chance.uniform(0, 0.05))
        else:  # a call is 4 to 14 statements: each of them is met, in first words, in later ones, in commits of steps
            die(path, life, promises, statement=1 + life // 2, after=bool(life % 2))
        promises.check(path)
    assert reading.verify(path) == []
    assert promises.committed > 3
    assert len(promises.answers) > 12
