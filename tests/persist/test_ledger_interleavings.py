"""The ledger under arbitrary interleavings of deliveries, crashes, fences and trainers that go back.

The model is a rollout fleet whose tokens are a function of (group, sample, position), and a trainer whose durable
points are a number. What the ledger is held to: each committed trajectory is trained exactly once, a replayed batch
is the same batch, groups go out first in first out, nothing that was acknowledged is generated again, and nothing
comes from elsewhere.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from robustrl import events
from robustrl.config import PersistConfig
from robustrl.errors import FencedError
from robustrl.persist import END, RESTART, Batch, LeaseGrant, Ledger, Outcome, Store
from robustrl.persist.trajectory import DONE
from robustrl.roles import Identity, Member

B, N, STEPS, LENGTH = 2, 2, 4, 5
ROLLOUTS = st.integers(0, 2)
SAMPLES = st.integers(0, N - 1)


def token(group: int, sample: int, position: int) -> int:
    return group * 10_000 + sample * 1_000 + position


class Fleet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="robustrl-test-"))
        self.events: list[Any] = []
        self.incarnation = dict.fromkeys(range(3), 1)
        self.trainer_incarnation = 1
        self.held: dict[Identity, LeaseGrant] = {}
        self.mail: list[tuple[Identity, Callable[[], Outcome]]] = []
        self.acked: dict[tuple[int, int], int] = {}
        """Tokens of each sample that the ledger acknowledged (less what a restart or a discard threw away)."""
        self.step = 0
        """The newest step that the living trainer did."""
        self.point = 0
        self.batches: dict[int, Batch] = {}
        self.highest_fresh = -1

    @initialize(staleness=st.integers(0, 2))
    def open_first(self, staleness: int) -> None:
        self.staleness = staleness
        self._open()

    def _open(self) -> None:
        self.store = Store(self.folder / "ledger.db")
        self.ledger = Ledger(
            self.store,
            lambda index: b"%d" % index,
            groups_per_batch=B,
            samples_per_prompt=N,
            total_steps=STEPS,
            config=PersistConfig(staleness=self.staleness, max_failure_streak=1000),
            clock=lambda: 0.0,
            emit=self.events.append,
        )

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.folder)

    def _rollout(self, index: int) -> Identity:
        return Identity(Member("rollout", index), self.incarnation[index])

    @property
    def _trainer(self) -> Identity:
        return Identity(Member("trainer"), self.trainer_incarnation)

    # -- rollouts --------------------------------------------------------------------------------------------------

    @rule(index=ROLLOUTS, lag=st.integers(0, 1))
    def lease(self, index: int, lag: int) -> None:
        owner = self._rollout(index)
        if owner in self.held:
            return
        newest = max(0, self.step - lag)
        grant = self.ledger.lease(owner, [newest])
        if grant is END:
            assert self.ledger._next == B * STEPS and all(group.done for group in self.ledger._groups.values())
        if not isinstance(grant, LeaseGrant):
            return
        assert newest >= grant.group // B - self.staleness
        if grant.attempt == 1:
            assert grant.group == self.highest_fresh + 1
            self.highest_fresh = grant.group
        assert all(grant.group != other.group or not self._lives(who, other) for who, other in self.held.items())
        for sample in grant.samples:
            assert sample.ids() == [token(grant.group, sample.sample, one) for one in range(sample.tokens)]
            assert sample.tokens >= self.acked.get((grant.group, sample.sample), 0)
        self.held[owner] = grant

    def _lives(self, owner: Identity, grant: LeaseGrant) -> bool:
        group = self.ledger._groups.get(grant.group)
        return group is not None and group.owner == owner and group.attempt == grant.attempt and not group.done

    def _deliver(self, owner: Identity, word: Callable[[], Outcome]) -> Outcome:
        """Delivers a word, and keeps a copy that may arrive again at any later time."""
        self.mail.append((owner, word))
        return word()

    @rule(index=ROLLOUTS, sample=SAMPLES, count=st.integers(1, 3), overlap=st.integers(0, 2))
    def generate(self, index: int, sample: int, count: int, overlap: int) -> None:
        owner = self._rollout(index)
        grant = self.held.get(owner)
        if grant is None or grant.samples[sample].finished:
            return
        key = (grant.group, sample)
        group = self.ledger._groups.get(grant.group)
        if group is not None and group.samples[sample].state in DONE:
            return
        saved = self.acked.get(key, 0) if self._lives(owner, grant) else 0
        start = max(0, saved - overlap)
        end = min(LENGTH, saved + count)
        if end <= start:
            return
        ids = [token(*key, one) for one in range(start, end)]
        arguments: dict[str, Any] = {
            "attempt": grant.attempt,
            "start": start,
            "ids": ids,
            "logprobs": [-float(one) for one in range(start, end)],
            "version": "1.0",
        }
        outcome = self._deliver(owner, lambda: self.ledger.append(owner, *key, **arguments))
        if outcome is Outcome.ACCEPTED:
            self.acked[key] = end
        assert (outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE)) == self._held_or_done(owner, grant)

    def _held_or_done(self, owner: Identity, grant: LeaseGrant) -> bool:
        group = self.ledger._groups.get(grant.group)
        return group is not None and group.owner == owner and group.attempt == grant.attempt

    @rule(index=ROLLOUTS, sample=SAMPLES)
    def finish(self, index: int, sample: int) -> None:
        owner = self._rollout(index)
        grant = self.held.get(owner)
        if grant is None or not self._lives(owner, grant):
            self.held.pop(owner, None)
            return
        key = (grant.group, sample)
        tokens = self.ledger._groups[grant.group].samples[sample].tokens
        reward = float(grant.group)

        def word() -> Outcome:
            return self.ledger.finish(owner, *key, attempt=grant.attempt, tokens=tokens, reward=reward)

        if not grant.samples[sample].finished:
            assert self._deliver(owner, word) in (Outcome.ACCEPTED, Outcome.DUPLICATE)
        if self.ledger._groups[grant.group].done:
            del self.held[owner]

    @rule(index=ROLLOUTS, sample=SAMPLES)
    def finish_all(self, index: int, sample: int) -> None:
        for one in range(N):
            self.finish(index, (sample + one) % N)

    @rule(index=ROLLOUTS, sample=st.none() | SAMPLES, restart=st.booleans())
    def fail(self, index: int, sample: int | None, restart: bool) -> None:
        owner = self._rollout(index)
        grant = self.held.get(owner)
        if grant is None or not self._lives(owner, grant):
            return
        kind = RESTART if restart else "engine"
        outcome = self.ledger.fail(owner, grant.group, sample, attempt=grant.attempt, kind=kind)
        if outcome is Outcome.ACCEPTED:
            del self.held[owner]
            for one, now in enumerate(self.ledger._groups[grant.group].samples):
                if restart and sample in (None, one) and now.state == "failed":
                    self.acked.pop((grant.group, one), None)

    @precondition(lambda self: self.mail)
    @rule(data=st.data())
    def old_mail_arrives_again(self, data: st.DataObject) -> None:
        owner, word = data.draw(st.sampled_from(self.mail))
        before = self.ledger.stats()["states"], self.ledger.stats()["tokens_in_flight"]
        try:
            assert word() in (Outcome.DUPLICATE, Outcome.SUPERSEDED)
        except FencedError:
            assert owner.incarnation < self.ledger._fences[owner.member]
        assert before == (self.ledger.stats()["states"], self.ledger.stats()["tokens_in_flight"])

    @rule(index=ROLLOUTS)
    def rollout_dies(self, index: int) -> None:
        self.incarnation[index] += 1
        self.ledger.release_owner(Member("rollout", index), self.incarnation[index])

    # -- the ledger ------------------------------------------------------------------------------------------------

    @rule()
    def ledger_dies(self) -> None:
        self.store.close()
        self._open()

    @rule()
    def whole_job_restarts(self) -> None:
        self.ledger.discard_uncommitted()
        self.acked = {key: count for key, count in self.acked.items() if key[0] < self.ledger.committed * B}
        self.held.clear()
        self.step = self.point = self.ledger.committed
        self.batches = {step: batch for step, batch in self.batches.items() if step <= self.point}
        for index in self.incarnation:
            self.rollout_dies(index)

    # -- the trainer -----------------------------------------------------------------------------------------------

    @rule()
    def make_and_train_a_step(self) -> None:
        """Gets far: without this few examples would leave the first steps."""
        for index in (0, 1, 2, 0, 1, 2):
            self.lease(index, 0)
            self.generate(index, 0, 2, 0)
            self.finish_all(index, 0)
        self.train()

    @rule()
    def train(self) -> None:
        batch = self.ledger.next_batch(self._trainer, self.step + 1)
        if batch is END:
            assert self.step == STEPS
        if not isinstance(batch, Batch):
            return
        self.step += 1
        expected = [f"{group}/{sample}" for group in range((self.step - 1) * B, self.step * B) for sample in range(N)]
        assert [one.id for one in batch.trajectories] == expected
        for one in batch.trajectories:
            assert one.prompt == b"%d" % one.group and one.reward == float(one.group)
            assert one.ids() == [token(one.group, one.sample, position) for position in range(one.tokens)]
        assert batch.replay == (self.step in self.batches)
        if batch.replay:
            assert batch.trajectories == self.batches[self.step].trajectories
        self.batches[self.step] = batch

    @precondition(lambda self: self.step > self.point)
    @rule(told=st.booleans())
    def save_point(self, told: bool) -> None:
        self.point = self.step
        if told:
            self.ledger.commit(self._trainer, self.point)

    @rule()
    def trainer_dies(self) -> None:
        old = self._trainer
        self.trainer_incarnation += 1
        self.ledger.rewind(self._trainer, self.point)
        self.step = self.point
        with contextlib.suppress(FencedError):
            self.ledger.next_batch(old, self.step + 1)
            raise AssertionError("an older trainer got a batch")

    @precondition(lambda self: self.point > 0)
    @rule()
    def newest_point_is_corrupt(self) -> None:
        self.point -= 1
        self.trainer_dies()

    # -- always ----------------------------------------------------------------------------------------------------

    @invariant()
    def committed_steps_are_whole(self) -> None:
        if not hasattr(self, "ledger") or not self.ledger.committed:
            return
        audit = self.ledger.audit(self.ledger.committed)
        assert (audit.lost, audit.duplicated, audit.foreign) == ((), (), ())
        assert audit.committed == self.ledger.committed * B * N

    @invariant()
    def events_are_of_this_job(self) -> None:
        consumed = [one for one in self.events if isinstance(one, events.BatchConsumed)]
        assert all(len(one.trajectories) == B * N for one in consumed)


Fleet.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestFleet = Fleet.TestCase
