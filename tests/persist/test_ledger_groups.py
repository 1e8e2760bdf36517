"""Groups that come short: leases that expire, attempts that bring nothing, and what the rule makes of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_ledger_core import TRAINER, Bench, rollout

from robustrl import events
from robustrl.config import PersistConfig, RobustConfig
from robustrl.errors import ConfigError, JobFailedError
from robustrl.persist import END, RESTART, Outcome


def make(tmp_path: Path, **settings: Any) -> Bench:
    return Bench(tmp_path / "ledger.db", config=PersistConfig(staleness=3, max_barren_attempts=2, **settings))


def said(bench: Bench) -> list[tuple[int, int, str]]:
    return [(event.group, event.finished, event.rule) for event in bench.said(events.GroupGivenUp)]


def test_a_prompt_at_which_every_attempt_fails_is_given_up_and_handed_out_no_more(tmp_path: Path) -> None:
    bench = make(tmp_path)
    for attempt in range(2):
        grant = bench.lease(rollout(attempt))
        assert grant.group == 0
        bench.ledger.fail(rollout(attempt), 0, None, attempt=grant.attempt, kind="engine", detail="it crashed")
    assert said(bench) == [(0, 0, "drop")]
    assert "2 attempts in a row brought nothing; the last one: failed: engine, it crashed" in (
        bench.said(events.GroupGivenUp)[0].why
    )
    assert bench.lease(rollout(0)).group == 1
    bench.reopen()
    assert bench.lease(rollout(1)).group == 2


def test_an_attempt_that_brings_a_token_or_an_answer_is_not_barren(tmp_path: Path) -> None:
    bench = make(tmp_path)
    for start in range(10):
        grant = bench.lease(rollout(0))
        assert grant.group == 0
        bench.append(rollout(0), grant, 0, start, [start])
        bench.ledger.fail(rollout(0), 0, None, attempt=grant.attempt, kind="engine")
    assert said(bench) == []


def test_tokens_that_are_dropped_again_are_no_gain(tmp_path: Path) -> None:
    bench = make(tmp_path)
    for _ in range(2):
        grant = bench.lease(rollout(0))
        bench.append(rollout(0), grant, 0, 0, [1, 2])
        bench.ledger.fail(rollout(0), 0, None, attempt=grant.attempt, kind=RESTART)
    assert said(bench) == [(0, 0, "drop")]


def test_a_prompt_that_kills_whoever_works_on_it_is_given_up(tmp_path: Path) -> None:
    bench = make(tmp_path)
    for incarnation in (1, 2):
        assert bench.lease(rollout(0, incarnation)).group == 0
        bench.ledger.release_owner(rollout(0).member, incarnation + 1)
    assert said(bench) == [(0, 0, "drop")]


def partial(bench: Bench) -> None:
    """Group 0 has one of two answers; groups 1 and 2 are whole."""
    for _ in range(3):
        grant = bench.lease(rollout(0))
        if not grant.samples[0].finished:
            bench.append(rollout(0), grant, 0, 0, [7])
            bench.finish(rollout(0), grant, 0, 1)
        bench.ledger.fail(rollout(0), 0, 1, attempt=grant.attempt, kind="engine")
    for group in (1, 2):
        grant = bench.lease(rollout(0))
        assert grant.group == group
        bench.work(rollout(0), grant)


def test_a_partial_group_is_left_out_of_its_batch_and_the_batch_says_so(tmp_path: Path) -> None:
    bench = make(tmp_path, partial_groups="drop")
    partial(bench)
    batch = bench.batch(1)
    assert [one.id for one in batch.trajectories] == ["1/0", "1/1"]
    assert (batch.partial, batch.omitted) == ((), (0,))
    bench.ledger.commit(TRAINER, 1)
    audit = bench.ledger.audit(1)
    assert (audit.lost, audit.foreign, audit.omitted) == ((), (), ("0/0", "0/1"))


def test_a_partial_group_may_be_used_and_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    bench = make(tmp_path, partial_groups="use")
    partial(bench)
    batch = bench.batch(1)
    assert [one.id for one in batch.trajectories] == ["0/0", "1/0", "1/1"]
    assert (batch.partial, batch.omitted) == ((0,), ())
    bench.ledger.commit(TRAINER, 1)
    audit = bench.ledger.audit(1)
    assert (audit.lost, audit.omitted) == ((), ("0/1",))


def test_the_next_group_takes_the_place_of_a_partial_one_and_the_run_keeps_its_length(tmp_path: Path) -> None:
    bench = make(tmp_path, partial_groups="refill")
    partial(bench)
    assert [one.id for one in bench.batch(1).trajectories] == ["1/0", "1/1", "2/0", "2/1"]
    bench.reopen()
    assert [one.id for one in bench.batch(1).trajectories] == ["1/0", "1/1", "2/0", "2/1"]  # a replay is the same
    for step in (2, 3, 4):
        for _ in range(2):
            bench.work(rollout(0), bench.lease(rollout(0), step - 1))
        batch = bench.batch(step)
        assert {one.group for one in batch.trajectories} == {2 * step - 1, 2 * step}
    assert bench.ledger.next_batch(TRAINER, 5) is END
    bench.ledger.commit(TRAINER, 4)
    audit = bench.ledger.audit(4)
    assert (audit.lost, audit.duplicated, audit.foreign, audit.omitted) == ((), (), (), ("0/0", "0/1"))
    assert audit.committed == 16


def test_a_step_without_any_answer_ends_the_job_with_the_cause(tmp_path: Path) -> None:
    bench = make(tmp_path)
    for _ in range(4):
        grant = bench.lease(rollout(0))
        bench.ledger.fail(rollout(0), grant.group, None, attempt=grant.attempt, kind="engine")
    with pytest.raises(JobFailedError, match="no group of step 1 has an answer"):
        bench.ledger.next_batch(TRAINER, 1)


def test_a_whole_job_restart_gives_what_was_given_up_another_chance(tmp_path: Path) -> None:
    bench = make(tmp_path)
    partial(bench)
    bench.ledger.discard_uncommitted()
    assert bench.lease(rollout(0)).group == 0


def test_a_lease_of_which_nothing_is_heard_ends_and_says_what_is_awaited(tmp_path: Path) -> None:
    now = [0.0]
    bench = Bench(tmp_path / "l.db", now=lambda: now[0], config=PersistConfig(lease_s=10.0))
    grant = bench.lease(rollout(0))
    bench.append(rollout(0), grant, 0, 0, [1])
    bench.finish(rollout(0), grant, 0, 1)
    now[0] = 9.0
    bench.append(rollout(0), grant, 1, 0, [5])
    now[0] = 18.0
    assert bench.ledger.expire() == []
    now[0] = 19.1
    assert bench.ledger.expire() == [0]
    assert bench.said(events.Alarm)[-1].text == "nothing came of 0/1 from rollout/0#1 for 10 s"
    again = bench.lease(rollout(1))
    assert (again.group, again.samples[0].finished, again.samples[1].ids()) == (0, True, [5])
    assert bench.append(rollout(0), grant, 1, 1, [6]) is Outcome.SUPERSEDED


def test_exact_staleness_and_refilled_batches_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="keep its place"):
        RobustConfig.from_dict(
            {"persist": {"exact_staleness": True, "partial_groups": "refill"}, "reconnect": {"keep_versions": 4}}
        )
