"""The ledger under arbitrary interleavings of deliveries, crashes, fences and trainers that go back.

The model is a rollout fleet that remembers each token the ledger acknowledged, and a trainer whose durable points are
a number. What the ledger is held to: each committed trajectory is trained exactly once, a replayed batch
is the same batch, groups go out first in first out, nothing that was acknowledged is generated again, and nothing
comes from elsewhere.
"""

from __future__ import annotations

import contextlib
import itertools
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


class Fleet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="robustrl-test-"))
        self.events: list[Any] = []
        self.incarnation = dict.fromkeys(range(3), 1)
        self.trainer_incarnation = 1
        self.held: dict[Identity, LeaseGrant] = {}
        self.mail: list[tuple[Identity, Callable[[], Outcome]]] = []
        self.truth: dict[tuple[int, int], list[int]] = {}
        """Tokens of each sample that the ledger acknowledged (less what a restart or a discard threw away)."""
        self.fresh = itertools.count()
        """Each token that is generated is another one: a token that is generated again does not go unnoticed."""
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
        if owner in self.held and self._lives(owner, self.held[owner]):
            return
        newest = max(0, self.step - lag)
        grant = self.ledger.lease(owner, [newest])
        groups = self.ledger._board.groups
        if grant is END:
            assert self.ledger._leases.next == B * STEPS and all(group.done for group in groups.values())
        if not isinstance(grant, LeaseGrant):
            return
        assert newest >= grant.group // B - self.staleness
        assert all(group.done or group.owner is not None for group in groups.values() if group.index < grant.group)
        assert all(grant.group != other.group or not self._lives(who, other) for who, other in self.held.items())
        if grant.attempt == 1:
            assert grant.group == self.highest_fresh + 1
            self.highest_fresh = grant.group
        for sample in grant.samples:
            assert sample.ids() == self.truth.get((grant.group, sample.sample), [])
        self.held[owner] = grant

    def _lives(self, owner: Identity, grant: LeaseGrant) -> bool:
        group = self.ledger._board.groups.get(grant.group)
        return group is not None and group.owner == owner and group.attempt == grant.attempt and not group.done

    def _deliver(self, owner: Identity, word: Callable[[], Outcome]) -> Outcome:
        """Delivers a word, and keeps a copy that may arrive again at any later time."""
        self.mail.append((owner, word))
        return word()

    @rule(index=ROLLOUTS, pushes=st.lists(st.tuples(SAMPLES, st.integers(1, 3), st.integers(0, 2)), max_size=5))
    def work(self, index: int, pushes: list[tuple[int, int, int]]) -> None:
        """A rollout generates, with a lease that it holds or takes. An answer of full length is finished."""
        self.lease(index, 0)
        owner = self._rollout(index)
        for sample, count, overlap in pushes:
            grant = self.held.get(owner)
            if grant is None or not self._lives(owner, grant):
                return
            if self.ledger._board.groups[grant.group].samples[sample].state not in DONE:
                self._generate(owner, grant, sample, count, overlap)

    @rule(pushes=st.lists(st.tuples(ROLLOUTS, SAMPLES, st.integers(2, 4)), min_size=6, max_size=20))
    def everyone_works(self, pushes: list[tuple[int, int, int]]) -> None:
        for index, sample, count in pushes:
            self.work(index, [(sample, count, 0)])

    @rule(pushes=st.lists(st.tuples(ROLLOUTS, SAMPLES), min_size=8, max_size=20))
    def steps_are_trained(self, pushes: list[tuple[int, int]]) -> None:
        self.everyone_works([(index, sample, LENGTH) for index, sample in pushes])
        for _ in range(2):
            self.train()

    def _generate(self, owner: Identity, grant: LeaseGrant, sample: int, count: int, overlap: int) -> None:
        key = (grant.group, sample)
        saved = self.truth.setdefault(key, [])
        start, end = max(0, len(saved) - overlap), min(LENGTH, len(saved) + count)
        ids = [*saved[start:], *itertools.islice(self.fresh, end - len(saved))]
        arguments: dict[str, Any] = {
            "attempt": grant.attempt,
            "start": start,
            "ids": ids,
            "logprobs": [-float(one) for one in ids],
            "version": "1.0",
        }
        assert self._deliver(owner, lambda: self.ledger.append(owner, *key, **arguments)) is Outcome.ACCEPTED
        saved[start:] = ids
        if len(saved) == LENGTH:
            self._finish(owner, grant, sample)

    @rule(index=ROLLOUTS, sample=SAMPLES)
    def finish_early(self, index: int, sample: int) -> None:
        owner = self._rollout(index)
        grant = self.held.get(owner)
        if grant is None or not self._lives(owner, grant):
            return
        if self.ledger._board.groups[grant.group].samples[sample].state not in DONE:
            self._finish(owner, grant, sample)

    def _finish(self, owner: Identity, grant: LeaseGrant, sample: int) -> None:
        tokens = len(self.truth.get((grant.group, sample), []))

        def word() -> Outcome:
            return self.ledger.finish(
                owner, grant.group, sample, attempt=grant.attempt, tokens=tokens, reward=float(grant.group)
            )

        assert self._deliver(owner, word) is Outcome.ACCEPTED

    @rule(index=ROLLOUTS, sample=SAMPLES)
    def speak_about_a_lost_lease(self, index: int, sample: int) -> None:
        owner = self._rollout(index)
        grant = self.held.get(owner)
        group = None if grant is None else self.ledger._board.groups.get(grant.group)
        if grant is None or (group is not None and (group.owner, group.attempt) == (owner, grant.attempt)):
            return
        with contextlib.suppress(FencedError):
            outcome = self.ledger.finish(owner, grant.group, sample, attempt=grant.attempt, tokens=0, reward=9.0)
            assert outcome is Outcome.SUPERSEDED

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
            for one, now in enumerate(self.ledger._board.groups[grant.group].samples):
                if restart and sample in (None, one) and now.state == "failed":
                    self.truth.pop((grant.group, one), None)

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

    @precondition(lambda self: self.step > self.point)
    @rule()
    def whole_job_restarts(self) -> None:
        self.ledger.discard_uncommitted()
        self.truth = {key: ids for key, ids in self.truth.items() if key[0] < self.ledger.committed * B}
        self.held.clear()
        self.step = self.point = self.ledger.committed
        self.batches = {step: batch for step, batch in self.batches.items() if step <= self.point}
        for index in self.incarnation:
            self.rollout_dies(index)

    # -- the trainer -----------------------------------------------------------------------------------------------

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
            assert one.ids() == self.truth.get((one.group, one.sample), [])
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
    max_examples=250,
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestFleet = Fleet.TestCase
