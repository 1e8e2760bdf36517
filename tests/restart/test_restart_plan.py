"""The planner: the smallest set of actions, and an end to patience."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robustrl.config import RestartConfig
from robustrl.detect import ProcessId
from robustrl.restart import (
    Abandon,
    FailJob,
    Loss,
    MemberRecord,
    MemberState,
    Plan,
    Promote,
    RestartJob,
    Spawn,
    plan,
)
from robustrl.roles import Identity, Member

S = MemberState
NOW = 10_000.0
PROCESS = ProcessId(7, 70)
CONFIG = RestartConfig(budget=4, window_s=300.0)
SERVES = frozenset({"trainer", "rollout"})


def record(name: str, state: MemberState) -> MemberRecord:
    identity = Identity.parse(name)
    return MemberRecord(identity.member, identity.incarnation, state, PROCESS)


def lost(name: str, *, ago: float = 0.0, step: int = 5, served: bool = True, recovered: bool = False) -> Loss:
    return Loss(Identity.parse(name), NOW - ago, step, f"the cause of {name}", served, recovered)


def job(*changes: MemberRecord) -> list[MemberRecord]:
    """A job in full work, with some records put in the place of others."""
    usual = [
        record("manager/0#1", S.SERVING),
        record("trainer/0#1", S.SERVING),
        *(record(f"rollout/{n}#1", S.SERVING) for n in range(3)),
        record("standby/0#1", S.STANDBY),
    ]
    changed = {one.member: one for one in changes}
    return [changed.get(one.member, one) for one in usual]


def decide(
    loss: Loss,
    records: list[MemberRecord] | None = None,
    history: list[Loss] | None = None,
    job_restarts: tuple[float, ...] = (),
    config: RestartConfig = CONFIG,
    serves: frozenset[str] = SERVES,
) -> Plan:
    if records is None:
        records = job(record(str(loss.identity), S.DEAD))
    return plan(loss, records, history or [], job_restarts, config, serves=serves, now=NOW)


# -- one loss -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trainer/0#1", "rollout/1#1"])
def test_a_warm_standby_takes_the_place_and_is_made_again(name: str) -> None:
    loss = lost(name)
    assert decide(loss).actions == (
        Promote(Identity.parse("standby/0#1"), loss.identity.member),
        Spawn(Member("standby")),
    )


@pytest.mark.parametrize("state", [S.DEAD, S.PROMOTED])
def test_without_a_warm_standby_the_member_is_started_cold(state: MemberState) -> None:
    loss = lost("trainer/0#1")
    records = job(record("trainer/0#1", S.DEAD), record("standby/0#1", state))
    assert decide(loss, records).actions == (Spawn(Member("trainer")),)


def test_a_standby_that_is_still_starting_is_ahead_of_a_cold_start_and_behind_a_warm_one() -> None:
    loss = lost("trainer/0#1")
    starting, warm = record("standby/0#1", S.STARTING), record("standby/1#1", S.STANDBY)
    dead = record("trainer/0#1", S.DEAD)
    assert decide(loss, job(dead, starting)).actions == (
        Promote(starting.identity, Member("trainer")),
        Spawn(starting.member),
    )
    assert decide(loss, [*job(dead, starting), warm]).actions == (
        Promote(warm.identity, Member("trainer")),
        Spawn(warm.member),
    )


def test_a_role_that_standbys_do_not_serve_and_the_policy_cold_start_cold() -> None:
    assert decide(lost("manager/0#1")).actions == (Spawn(Member("manager")),)
    cold = RestartConfig(standby="cold")
    assert decide(lost("rollout/2#1"), config=cold).actions == (Spawn(Member("rollout", 2)),)


def test_a_lost_standby_is_replaced_until_its_budget_is_spent_and_never_ends_the_job() -> None:
    loss = lost("standby/0#9")
    records = job(record("standby/0#9", S.DEAD))
    assert decide(loss, records).actions == (Spawn(Member("standby")),)
    often = [lost(f"standby/0#{n}", ago=1.0, served=False) for n in range(1, 5)]
    assert decide(loss, records, often).actions == (Abandon(Member("standby")),)


def test_a_standby_that_has_no_process_yet_cannot_take_a_place() -> None:
    unborn = MemberRecord(Member("standby"), 2, S.STARTING)
    assert decide(lost("trainer/0#1"), job(record("trainer/0#1", S.DEAD), unborn)).actions == (
        Spawn(Member("trainer")),
    )


@pytest.mark.parametrize(
    "now", [record("rollout/1#2", S.STARTING), record("rollout/1#1", S.SERVING), record("rollout/1#1", S.FINISHED)]
)
def test_a_stale_a_living_and_a_finished_incarnation_need_nothing(now: MemberRecord) -> None:
    assert decide(lost("rollout/1#1"), job(now)).actions == ()


def test_an_unknown_member_needs_nothing() -> None:
    assert decide(lost("rollout/77#1"), job()).actions == ()


# -- giving up ----------------------------------------------------------------------------------------------------


def test_a_rollout_over_its_budget_is_abandoned_while_others_can_do_the_work() -> None:
    history = [lost(f"rollout/{n % 3}#1", ago=10.0, recovered=True) for n in range(4)]
    loss = lost("rollout/1#1")
    assert decide(loss, history=history).actions == (Abandon(Member("rollout", 1)),)


def test_the_last_rollout_over_its_budget_ends_the_job_with_the_first_cause() -> None:
    history = [lost("rollout/0#1", ago=20.0), lost("rollout/2#1", ago=19.0), *[lost("rollout/1#1", ago=9.0)] * 2]
    records = job(*(record(f"rollout/{n}#1", S.DEAD) for n in range(3)))
    (action,) = decide(lost("rollout/1#1"), records, history).actions
    assert action == FailJob("the cause of rollout/0#1")


def test_fewer_rollouts_than_the_least_count_end_the_job() -> None:
    history = [lost("rollout/1#1", ago=10.0, recovered=True)] * 4
    config = RestartConfig(budget=4, min_rollouts=3)
    (action,) = decide(lost("rollout/1#1"), history=history, config=config).actions
    assert isinstance(action, FailJob)


@pytest.mark.parametrize("role", ["trainer", "manager"])
def test_any_other_role_over_its_budget_ends_the_job(role: str) -> None:
    history = [lost(f"{role}/0#{n}", ago=10.0, step=n, recovered=True) for n in range(1, 5)]
    loss = lost(f"{role}/0#5", step=9)
    (action,) = decide(loss, job(record(f"{role}/0#5", S.DEAD)), history).actions
    assert action == FailJob(loss.cause)  # all that went before was recovered


def test_losses_outside_the_window_are_forgiven() -> None:
    history = [lost(f"manager/0#{n}", ago=301.0, recovered=True) for n in range(1, 9)]
    assert decide(lost("manager/0#9"), job(record("manager/0#9", S.DEAD)), history).actions == (
        Spawn(Member("manager")),
    )


def test_the_first_cause_is_the_first_that_was_never_recovered() -> None:
    history = [
        lost("trainer/0#1", ago=50.0, recovered=True),
        lost("manager/0#1", ago=40.0),
        lost("manager/0#2", ago=30.0, served=False),
    ]
    loss = lost("manager/0#3", served=False)
    (action,) = decide(loss, job(record("manager/0#3", S.DEAD)), history, (NOW - 5.0,)).actions
    assert action == FailJob("the cause of manager/0#1")


# -- the paper's rules --------------------------------------------------------------------------------------------


def test_a_step_that_fails_twice_restarts_the_job_once_and_then_fails_it() -> None:
    records = job(record("trainer/0#2", S.DEAD))
    history = [lost("trainer/0#1", ago=10.0, recovered=True)]
    loss = lost("trainer/0#2")
    assert decide(loss, records, history).actions == (RestartJob(),)
    (action,) = decide(loss, records, history, (NOW - 5.0,)).actions
    assert isinstance(action, FailJob)
    assert decide(loss, records, history, (NOW - 301.0,)).actions == (RestartJob(),)


@pytest.mark.parametrize(("before", "now"), [(4, 5), (0, 0), (-1, -1)])
def test_another_step_or_no_step_at_all_is_no_repetition(before: int, now: int) -> None:
    history = [lost("trainer/0#1", ago=10.0, step=before, recovered=True)]
    found = decide(lost("trainer/0#2", step=now), job(record("trainer/0#2", S.DEAD)), history)
    assert isinstance(found.actions[0], Promote)


def test_rollouts_may_fail_twice_in_a_step() -> None:
    history = [lost("rollout/1#1", ago=10.0, recovered=True)]
    found = decide(lost("rollout/1#2"), job(record("rollout/1#2", S.DEAD)), history)
    assert isinstance(found.actions[0], Promote)


def test_a_restart_that_fails_twice_restarts_the_job() -> None:
    records = job(record("manager/0#3", S.DEAD))
    once = [lost("manager/0#1", ago=10.0), lost("manager/0#2", ago=5.0, served=False)]
    loss = lost("manager/0#3", served=False)
    assert decide(loss, records, once[:1]).actions == (Spawn(Member("manager")),)
    assert decide(loss, records, once).actions == (RestartJob(),)


def test_the_policy_whole_job_restarts_everything_until_its_budget_is_spent() -> None:
    config = RestartConfig(policy="whole-job", budget=2)
    loss = lost("rollout/1#1")
    for restarts in ((), (NOW - 1.0,), (NOW - 301.0,) * 7):
        assert decide(loss, job_restarts=restarts, config=config).actions == (RestartJob(),)
    (action,) = decide(loss, job_restarts=(NOW - 2.0, NOW - 1.0), config=config).actions
    assert isinstance(action, FailJob)


# -- whatever happens ---------------------------------------------------------------------------------------------

names = st.sampled_from(["manager/0", "trainer/0", "rollout/0", "rollout/1", "rollout/2", "standby/0", "standby/1"])
records = st.lists(
    st.builds(
        lambda name, *rest: MemberRecord(Member.parse(name), *rest),
        names,
        st.integers(1, 4),
        st.sampled_from(S),
        st.none() | st.just(PROCESS),
    ),
    unique_by=lambda one: one.member,
    min_size=1,
)
losses = st.builds(
    lambda name, incarnation, ago, step, served, recovered: lost(
        f"{name}#{incarnation}", ago=ago, step=step, served=served, recovered=recovered
    ),
    names,
    st.integers(1, 4),
    st.floats(0.0, 600.0),
    st.integers(-1, 3),
    st.booleans(),
    st.booleans(),
)
configs = st.builds(
    RestartConfig,
    policy=st.sampled_from(["role", "whole-job"]),
    standby=st.sampled_from(["dedicated", "cold"]),
    budget=st.integers(0, 4),
    min_rollouts=st.integers(0, 3),
)


@given(records, st.data(), configs, st.lists(losses, max_size=8), st.lists(st.floats(NOW - 600.0, NOW), max_size=3))
def test_a_plan_touches_the_dead_and_a_warm_standby_and_nobody_else(
    records: list[MemberRecord], data: st.DataObject, config: RestartConfig, history: list[Loss], restarts: list[float]
) -> None:
    struck = data.draw(st.sampled_from(records))
    loss = data.draw(losses.filter(lambda one: one.identity.member == struck.member))
    arguments: dict[str, Any] = {"serves": SERVES, "now": NOW}
    found = plan(loss, records, history, restarts, config, **arguments)
    assert found == plan(loss, list(records), list(history), list(restarts), config, **arguments)  # pure
    assert found.why
    by_member = {one.member: one for one in records}
    for action in found.actions:
        assert str(action)
        if isinstance(action, Promote):
            warm = by_member[action.standby.member]
            assert warm.identity == action.standby and warm.member.role == "standby"
            assert warm.state in (S.STANDBY, S.STARTING) and warm.process is not None
            assert action.member == struck.member
            assert found.actions == (action, Spawn(warm.member))
        elif isinstance(action, Spawn):
            assert action.member == struck.member or len(found.actions) == 2
        elif isinstance(action, Abandon):
            assert action.member == struck.member and struck.member.role in ("rollout", "standby")
    if struck.living or struck.state is S.FINISHED or struck.incarnation != loss.identity.incarnation:
        assert found.actions == ()
    else:
        assert found.actions
    if struck.member.role == "standby":
        assert not any(isinstance(action, RestartJob | FailJob | Promote) for action in found.actions)


@given(st.sampled_from(["manager/0", "trainer/0", "rollout/1"]), configs, st.booleans())
def test_a_member_that_always_dies_ends_in_a_decision_within_the_budget(
    name: str, config: RestartConfig, serves_before: bool
) -> None:
    history: list[Loss] = []
    restarts: list[float] = []
    for incarnation in range(1, 40):
        loss = lost(f"{name}#{incarnation}", step=incarnation, served=serves_before)
        records = [record(f"{name}#{incarnation}", S.DEAD)]
        (action, *_) = plan(loss, records, history, restarts, config, serves=SERVES, now=NOW).actions
        history.append(loss)
        if isinstance(action, FailJob):
            assert action.cause == f"the cause of {name}#1"
            assert len(history) <= config.budget + 2
            return
        if isinstance(action, RestartJob):
            restarts.append(NOW)
    pytest.fail("it was started for ever")
