"""The ledger, one behaviour a test."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from robustrl import events
from robustrl.config import PersistConfig
from robustrl.errors import FencedError, LedgerError, StorageError, WriterFencedError
from robustrl.persist import END, RESTART, Batch, LeaseGrant, Ledger, Outcome, Store
from robustrl.roles import Identity, Member

TRAINER = Identity(Member("trainer"), 1)


def rollout(index: int, incarnation: int = 1) -> Identity:
    return Identity(Member("rollout", index), incarnation)


class Bench:
    """A ledger that can be closed and opened again, with its events."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.options: dict[str, Any] = {
            "prompts": lambda index: b"prompt %d" % index,
            "groups_per_batch": 2,
            "samples_per_prompt": 2,
            "total_steps": 4,
            "config": PersistConfig(staleness=1),
        } | options
        self.events: list[events.Event] = []
        self.open()

    def open(self) -> None:
        self.store = Store(self.path)
        self.ledger = Ledger(self.store, clock=lambda: 5.0, emit=self.events.append, **self.options)

    def reopen(self) -> None:
        self.store.close()
        self.open()

    def lease(self, owner: Identity, held: int = 0) -> LeaseGrant:
        grant = self.ledger.lease(owner, [held])
        assert isinstance(grant, LeaseGrant)
        return grant

    def append(self, owner: Identity, grant: LeaseGrant, sample: int, start: int, ids: list[int]) -> Outcome:
        return self.ledger.append(
            owner,
            grant.group,
            sample,
            attempt=grant.attempt,
            start=start,
            ids=ids,
            logprobs=[-0.5 * one for one in ids],
            version="1.0",
        )

    def finish(self, owner: Identity, grant: LeaseGrant, sample: int, tokens: int, reward: float = 1.0) -> Outcome:
        return self.ledger.finish(
            owner, grant.group, sample, attempt=grant.attempt, tokens=tokens, reward=reward, finish_reason="eos"
        )

    def work(self, owner: Identity, grant: LeaseGrant) -> None:
        for sample in grant.samples:
            if not sample.finished:
                self.append(owner, grant, sample.sample, sample.tokens, [grant.group, sample.sample])
                self.finish(owner, grant, sample.sample, sample.tokens + 2)

    def batch(self, step: int, trainer: Identity = TRAINER) -> Batch:
        batch = self.ledger.next_batch(trainer, step)
        assert isinstance(batch, Batch)
        return batch

    def run_step(self, step: int) -> Batch:
        """Generates and consumes the batch of `step`."""
        for _ in range(2):
            self.work(rollout(0), self.lease(rollout(0), step - 1))
        return self.batch(step)

    def said(self, kind: type[events.Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "ledger.db")


def test_groups_are_handed_out_in_the_order_of_prompts(bench: Bench) -> None:
    assert [bench.lease(rollout(index)).group for index in range(3)] == [0, 1, 2]


def test_staleness_bounds_which_group_may_be_leased(bench: Bench) -> None:
    for _ in range(4):  # steps 1 and 2 may be made by the initial weights
        bench.lease(rollout(0), 0)
    assert bench.ledger.lease(rollout(0), [0]) is None
    assert bench.lease(rollout(0), 1).group == 4


def test_exact_staleness_names_the_version_and_does_not_ask_for_it_to_be_held(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "l.db", config=PersistConfig(staleness=1, exact_staleness=True))
    required = [bench.lease(rollout(0), 3).required_step for _ in range(8)]
    assert required == [0, 0, 0, 0, 1, 1, 2, 2]


def test_a_new_owner_gets_the_saved_tokens_with_their_versions(bench: Bench) -> None:
    old, new = rollout(0, 1), rollout(0, 2)
    grant = bench.lease(old)
    bench.append(old, grant, 0, 0, [7, 8])
    bench.append(old, grant, 1, 0, [9])
    bench.finish(old, grant, 1, 1, 0.25)
    assert bench.ledger.release_owner(Member("rollout", 0), 2) == 1
    again = bench.lease(new)
    first, second = again.samples
    assert (again.group, again.attempt) == (0, 2)
    assert (first.ids(), first.logprobs(), first.versions(), first.finished) == (
        [7, 8],
        [-3.5, -4.0],
        ["1.0"] * 2,
        False,
    )
    assert (second.ids(), second.finished, second.reward) == ([9], True, 0.25)
    assert bench.said(events.Leased)[-1].saved_tokens == 3
    assert [(one.owner, one.tokens) for one in bench.said(events.TokensKept)] == [("rollout/0#1", 3)]


def test_the_words_of_a_fenced_incarnation_are_refused_and_counted(bench: Bench) -> None:
    old = rollout(0, 1)
    grant = bench.lease(old)
    bench.ledger.release_owner(Member("rollout", 0), 2)
    with pytest.raises(FencedError, match="rollout/0#1"):
        bench.append(old, grant, 0, 0, [1])
    with pytest.raises(FencedError):
        bench.ledger.lease(old, [0])
    bench.reopen()
    with pytest.raises(FencedError):
        bench.finish(old, grant, 0, 0)
    assert len(bench.said(events.Refused)) == 3
    assert bench.ledger.stats()["fenced"] == 1


def test_a_newer_incarnation_fences_its_predecessor_by_speaking(bench: Bench) -> None:
    grant = bench.lease(rollout(0, 1))
    assert bench.lease(rollout(0, 2)).group == grant.group
    with pytest.raises(FencedError):
        bench.append(rollout(0, 1), grant, 0, 0, [1])


def test_late_words_of_an_old_attempt_of_the_same_owner_change_nothing(bench: Bench) -> None:
    owner = rollout(0)
    grant = bench.lease(owner)
    bench.append(owner, grant, 0, 0, [1, 2])
    bench.ledger.fail(owner, grant.group, None, attempt=grant.attempt, kind=RESTART, detail="constrained decoder")
    again = bench.lease(owner)
    assert again.samples[0].tokens == 0
    assert bench.append(owner, grant, 0, 0, [1, 2]) is Outcome.SUPERSEDED
    assert bench.append(owner, again, 0, 0, [5]) is Outcome.ACCEPTED
    assert bench.said(events.TokensDropped)[0].tokens == 2


def test_a_lease_whose_answer_was_lost_is_answered_again(bench: Bench) -> None:
    owner = rollout(0)
    first = bench.ledger.lease(owner, [0], "call-1")
    bench.reopen()
    assert bench.ledger.lease(owner, [0], "call-1") == first
    other = bench.ledger.lease(owner, [0], "call-2")
    assert isinstance(other, LeaseGrant) and other.group == 1


def test_tokens_delivered_twice_change_nothing_and_contradictions_are_refused(bench: Bench) -> None:
    owner = rollout(0)
    grant = bench.lease(owner)
    assert bench.append(owner, grant, 0, 0, [1, 2, 3]) is Outcome.ACCEPTED
    assert bench.append(owner, grant, 0, 0, [1, 2, 3]) is Outcome.DUPLICATE
    assert bench.append(owner, grant, 0, 1, [2, 3, 4]) is Outcome.ACCEPTED
    with pytest.raises(LedgerError, match="contradict"):
        bench.append(owner, grant, 0, 2, [3, 5])
    with pytest.raises(LedgerError, match="missing"):
        bench.append(owner, grant, 0, 9, [1])
    bench.reopen()
    bench.ledger.release_owner(owner.member, 2)
    assert bench.lease(rollout(1)).samples[0].ids() == [1, 2, 3, 4]


def test_a_finish_delivered_twice_is_counted_and_a_short_answer_is_refused(bench: Bench) -> None:
    owner = rollout(0)
    grant = bench.lease(owner)
    bench.append(owner, grant, 0, 0, [1])
    with pytest.raises(LedgerError):
        bench.finish(owner, grant, 0, 2)
    assert bench.finish(owner, grant, 0, 1) is Outcome.ACCEPTED
    assert bench.finish(owner, grant, 0, 1) is Outcome.DUPLICATE
    with pytest.raises(LedgerError, match="reward"):
        bench.finish(owner, grant, 1, 0, float("nan"))
    assert bench.ledger.stats()["duplicate_finishes"] == 1


def test_a_batch_waits_for_all_its_groups_and_then_comes_in_order(bench: Bench) -> None:
    late, early = bench.lease(rollout(0)), bench.lease(rollout(1))
    bench.work(rollout(1), early)
    assert bench.ledger.next_batch(TRAINER, 1) is None
    bench.work(rollout(0), late)
    batch = bench.batch(1)
    assert [one.id for one in batch.trajectories] == ["0/0", "0/1", "1/0", "1/1"]
    assert batch.trajectories[3].prompt == b"prompt 1"
    assert batch.trajectories[3].ids() == [1, 1]


def test_a_trainer_that_went_back_is_given_the_same_batches(bench: Bench) -> None:
    first, second = bench.run_step(1), bench.run_step(2)
    bench.ledger.commit(TRAINER, 1)
    bench.reopen()
    again = Identity(TRAINER.member, 2)
    rewound = bench.ledger.rewind(again, 1)
    assert (rewound.committed, rewound.consumed) == (1, 2)
    replayed = bench.batch(2, again)
    assert replayed.replay and replayed.trajectories == second.trajectories != first.trajectories
    with pytest.raises(FencedError):
        bench.ledger.next_batch(TRAINER, 2)
    with pytest.raises(FencedError):
        bench.ledger.commit(TRAINER, 2)


def test_going_back_to_a_point_that_the_ledger_did_not_hear_of_commits_it(bench: Bench) -> None:
    bench.run_step(1)
    bench.ledger.rewind(Identity(TRAINER.member, 2), 1)
    assert bench.ledger.committed == 1
    assert [one.step for one in bench.said(events.BatchCommitted)] == [1]


def test_going_back_behind_the_frontier_replays_committed_batches(bench: Bench) -> None:
    batches = [bench.run_step(step) for step in (1, 2)]
    bench.ledger.commit(TRAINER, 2)
    bench.reopen()
    bench.ledger.rewind(TRAINER, 0)
    assert [bench.batch(step).trajectories for step in (1, 2)] == [one.trajectories for one in batches]
    bench.ledger.commit(TRAINER, 2)
    assert bench.ledger.audit(2).lost == ()


def test_steps_are_not_skipped_and_not_committed_before_they_are_consumed(bench: Bench) -> None:
    with pytest.raises(LedgerError, match="step 2"):
        bench.ledger.next_batch(TRAINER, 2)
    with pytest.raises(LedgerError, match="committed"):
        bench.ledger.commit(TRAINER, 1)


def test_committing_is_idempotent_and_monotone(bench: Bench) -> None:
    for step in (1, 2):
        bench.run_step(step)
    for step in (2, 1, 2):
        bench.ledger.commit(TRAINER, step)
    assert bench.ledger.committed == 2
    # The newest is said again when it is committed again: its first saying may have died with a killed ledger.
    assert {(said.step, said.trajectories) for said in bench.said(events.BatchCommitted)} == {
        (step, bench.ledger.groups_per_batch * bench.ledger.samples_per_prompt) for step in (1, 2)
    }


def test_a_commit_whose_saying_died_with_its_ledger_is_said_by_the_next(bench: Bench) -> None:
    bench.run_step(1)
    bench.reopen()
    before = len(bench.said(events.BatchCommitted))
    bench.ledger.rewind(TRAINER, 1)
    assert [said.step for said in bench.said(events.BatchCommitted)[before:]] == [1]


def test_the_run_ends_only_when_all_groups_are_finished(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "l.db", total_steps=1)
    one, two = bench.lease(rollout(0)), bench.lease(rollout(1))
    bench.work(rollout(0), one)
    assert bench.ledger.lease(rollout(0), [0]) is None  # rollout/1 may die
    bench.ledger.release_owner(Member("rollout", 1), 2)
    assert bench.lease(rollout(0)).group == two.group
    bench.work(rollout(0), bench.ledger._leases._grant(bench.ledger._board.groups[two.group]))
    assert bench.ledger.lease(rollout(0), [0]) is END
    bench.batch(1)
    assert bench.ledger.next_batch(TRAINER, 2) is END


def test_a_source_that_ends_leaves_a_ragged_last_batch(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "l.db", prompts=[b"a", [1, 2], b"c"])
    for _ in range(3):
        bench.work(rollout(0), bench.lease(rollout(0)))
    assert bench.ledger.lease(rollout(0), [0]) is END
    bench.reopen()
    assert len(bench.batch(1).trajectories) == 4
    assert bench.batch(1).trajectories[2].prompt == [1, 2]
    assert [one.id for one in bench.batch(2).trajectories] == ["2/0", "2/1"]
    assert bench.ledger.next_batch(TRAINER, 3) is END


def test_failures_in_a_row_exhaust_the_job_with_the_first_cause(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "l.db", config=PersistConfig(max_failure_streak=2))
    owner = rollout(0)

    def fail(detail: str) -> None:
        grant = bench.lease(owner)
        bench.ledger.fail(owner, grant.group, 0, attempt=grant.attempt, kind="engine", detail=detail)

    fail("before a success")
    bench.work(owner, bench.lease(owner))
    for detail in ("out of memory", "second", "third"):
        assert bench.ledger.exhausted is None
        fail(detail)
    assert bench.ledger.exhausted is not None and "out of memory" in bench.ledger.exhausted
    assert bench.ledger.lease(owner, [0]) is None


def test_discarding_forgets_all_that_is_not_committed_and_says_how_much(bench: Bench) -> None:
    bench.run_step(1)
    bench.ledger.commit(TRAINER, 1)
    bench.run_step(2)
    grant = bench.lease(rollout(1), 1)
    bench.append(rollout(1), grant, 0, 0, [1, 2, 3])
    assert bench.ledger.discard_uncommitted() == 2 * 2 * 2 + 3
    assert bench.append(rollout(1), grant, 0, 3, [4]) is Outcome.SUPERSEDED
    bench.reopen()
    assert bench.ledger.consumed == 1
    assert bench.lease(rollout(1), 1).group == 2
    assert bench.said(events.TokensDropped)[0].tokens == 11


def test_a_fenced_trainer_may_not_discard(bench: Bench) -> None:
    bench.lease(rollout(0))
    bench.ledger.rewind(Identity(TRAINER.member, 2), 0)
    with pytest.raises(FencedError):
        bench.ledger.discard_uncommitted(by=TRAINER)
    assert bench.ledger.stats()["states"] == {"leased": 2}


def test_the_audit_finds_what_is_missing(bench: Bench) -> None:
    for step in (1, 2):
        bench.run_step(step)
    bench.ledger.commit(TRAINER, 1)
    audit = bench.ledger.audit(2)
    assert (audit.committed, audit.steps, audit.duplicated, audit.foreign) == (4, 1, (), ())
    assert audit.lost == ("2/0", "2/1", "3/0", "3/1")
    bench.ledger.commit(TRAINER, 2)
    assert bench.ledger.audit(2).lost == ()


def test_an_event_is_said_only_after_the_store_has_it(bench: Bench) -> None:
    with bench.ledger.deferred():
        bench.lease(rollout(0))
    assert bench.said(events.Leased) == []
    bench.ledger.flush()
    assert len(bench.said(events.Leased)) == 1


def test_a_store_that_cannot_be_written_leaves_memory_as_the_store_is(bench: Bench) -> None:
    grant = bench.lease(rollout(0))
    bench.append(rollout(0), grant, 0, 0, [1])
    assert bench.store._database is not None
    (pages,) = bench.store._database.execute("PRAGMA page_count").fetchone()
    bench.store._database.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StorageError, match="full"):
        bench.append(rollout(0), grant, 0, 1, list(range(1 << 16)))
    bench.store._database.execute("PRAGMA max_page_count=1000000")
    assert bench.append(rollout(0), grant, 0, 1, [2]) is Outcome.ACCEPTED
    assert bench.said(events.Leased)


def test_a_second_writer_of_the_store_fences_the_first(bench: Bench) -> None:
    grant = bench.lease(rollout(0))
    other = Store(bench.path)
    with pytest.raises(WriterFencedError):
        bench.append(rollout(0), grant, 0, 0, [1])
    other.close()


def test_a_damaged_segment_costs_its_tokens_and_no_more(bench: Bench) -> None:
    owner = rollout(0)
    grant = bench.lease(owner)
    for start in range(3):
        bench.append(owner, grant, 0, start, [start])
    bench.finish(owner, grant, 0, 3)
    bench.store.close()
    with sqlite3.connect(bench.path) as database:
        database.execute("UPDATE segments SET ids = x'07000000' WHERE start = 1")
    database.close()
    bench.open()
    assert any("damaged" in one.text for one in bench.said(events.Alarm))
    sample = bench.lease(rollout(1)).samples[0]
    assert (sample.ids(), sample.finished) == ([0], False)
    bench.reopen()  # and it stays mended
    assert bench.ledger.stats()["tokens_in_flight"] == 1


def test_a_damaged_row_that_cannot_be_mended_is_named(bench: Bench) -> None:
    bench.run_step(1)
    bench.store.close()
    with sqlite3.connect(bench.path) as database:
        database.execute("UPDATE segments SET ids = x'07000000' WHERE grp = 1 AND sample = 0")
    database.close()
    with pytest.raises(LedgerError, match=r"damaged") as caught:
        bench.open()
    bench.store.close()
    assert "segments" in str(caught.value)


def test_a_ledger_of_another_job_or_a_newer_schema_is_refused(bench: Bench, tmp_path: Path) -> None:
    bench.store.close()
    bench.options["groups_per_batch"] = 3
    with pytest.raises(LedgerError, match="another job"):
        bench.open()
    bench.store.close()
    with sqlite3.connect(bench.path) as database:
        database.execute("PRAGMA user_version=99")
    database.close()
    with pytest.raises(LedgerError, match="schema 99"):
        Store(bench.path)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as database:
        database.execute("CREATE TABLE t (x)")
    database.close()
    with pytest.raises(LedgerError, match="something else"):
        Store(foreign)


def test_a_journal_cut_in_its_last_record_opens_with_all_whole_records(bench: Bench, tmp_path: Path) -> None:
    owner = rollout(0)
    grant = bench.lease(owner)
    for start in range(40):
        bench.append(owner, grant, 0, start, [start])
    wal = Path(f"{bench.path}-wal").read_bytes()
    for cut in (1, 57, 200):
        copy = tmp_path / f"cut{cut}" / "ledger.db"
        copy.parent.mkdir()
        copy.write_bytes(bench.path.read_bytes())
        Path(f"{copy}-wal").write_bytes(wal[:-cut])
        short = Bench(copy)
        assert short.ledger.stats()["tokens_in_flight"] == 39
        short.store.close()
