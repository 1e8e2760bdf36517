from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from story import Story, any_event, any_log, realistic_run

from robustrl.events import Event
from robustrl.report import Recovery, bystander_restarts, recoveries

THREE = ("trainer/0", "rollout/0", "manager/0", "supervisor/0", "standby/0")


def parts(row: Recovery) -> list[float | None]:
    return [row.detect_s, row.plan_s, row.restart_s, row.reload_s, row.reconnect_s]


def one(story: Story) -> Recovery:
    (row,) = recoveries(story.events)
    return row


def running(policy: str = "role") -> Story:
    return Story(policy, THREE).everyone_serves(0.0, roles=("trainer", "rollout", "manager", "supervisor"))


@pytest.mark.parametrize("member", ["trainer/0", "rollout/0", "manager/0", "supervisor/0"])
def test_a_recovery_has_five_parts_that_follow_each_other(member: str) -> None:
    story = running().fault(f"{member}#1", 4.0, "stop", step=3).verdict(f"{member}#1", 5.0, "hung")
    story.plan(f"{member}#1", 5.25, f"spawn {member}").starts(f"{member}#2", 6.0, 6.5, 8.0, began=5.3).ends(10.0)
    row = one(story)
    assert (row.role, row.member, row.kind, row.step) == (member.partition("/")[0], member, "stop", 3)
    assert parts(row) == [1.0, 0.25, 0.75, 0.5, 1.5]
    assert (row.mttr_s, row.incarnation, row.successor) == (4.0, 1, 2)


def test_an_unrecovered_fault_has_no_mttr_but_the_parts_that_happened() -> None:
    story = running().fault("rollout/0#1", 4.0).verdict("rollout/0#1", 5.0).plan("rollout/0#1", 5.5).ends(10.0)
    row = one(story)
    assert row.mttr_s is None
    assert parts(row) == [1.0, 0.5, None, None, None]


def test_a_failure_that_nobody_injected_is_listed_from_its_verdict() -> None:
    story = running().step_done(1, 2.0).step_done(2, 3.0).verdict("rollout/0#1", 5.0).plan("rollout/0#1", 5.5)
    row = one(story.starts("rollout/0#2", 6.0, 6.0, 7.0).ends(10.0))
    assert (row.kind, row.step, row.detect_s, row.mttr_s) == ("dead", 3, 0.0, 2.0)


def test_a_milestone_that_is_not_said_takes_no_time_of_its_own() -> None:
    story = running().fault("manager/0#1", 4.0).verdict("manager/0#1", 5.0).plan("manager/0#1", 5.5)
    assert parts(one(story.starts("manager/0#2", 6.0, None, 7.0).ends(10.0))) == [1.0, 0.5, 0.5, 1.0, 0.0]


def test_a_member_killed_again_while_it_recovers_has_two_rows_and_both_end_when_it_serves() -> None:
    story = running().fault("rollout/0#1", 4.0).verdict("rollout/0#1", 4.5).plan("rollout/0#1", 4.5)
    story.starts("rollout/0#2", 5.0).fault("rollout/0#2", 5.5).verdict("rollout/0#2", 6.0)
    story.plan("rollout/0#2", 6.0).starts("rollout/0#3", 7.0, 7.5, 8.0).ends(10.0)
    first, second = recoveries(story.events)
    assert (first.mttr_s, first.successor) == (4.0, 3)
    assert (second.mttr_s, second.successor) == (2.5, 3)
    assert bystander_restarts(story.events) == 0


def test_a_whole_job_restart_lasts_until_the_last_trainer_or_rollout_serves() -> None:
    story = running("whole-job").fault("rollout/0#1", 4.0).verdict("rollout/0#1", 4.5)
    story.plan("rollout/0#1", 5.0, "restart the whole job")
    story.starts("rollout/0#2", 6.0, 6.5, 7.0, began=5.1).starts("trainer/0#2", 6.2, 7.2, 9.0, began=5.1)
    story.starts("manager/0#2", 5.5, 5.5, 5.5, began=5.1).starts("standby/0#2", 9.5, began=5.1).ends(12.0)
    row = one(story)
    assert row.mttr_s == 5.0
    assert parts(row) == pytest.approx([0.5, 0.5, 1.2, 1.0, 1.8])
    assert bystander_restarts(story.events) == 2


def test_a_fault_that_a_restart_of_the_whole_job_swallowed_ends_with_that_restart() -> None:
    story = running("whole-job").fault("rollout/0#1", 4.0).fault("manager/0#1", 4.2).verdict("rollout/0#1", 4.5)
    story.plan("rollout/0#1", 5.0, "restart the whole job")
    for member in ("rollout/0", "trainer/0", "manager/0"):
        story.starts(f"{member}#2", 6.0, 6.5, 8.0, began=5.1)
    assert [row.mttr_s for row in recoveries(story.ends(12.0).events)] == pytest.approx([4.0, 3.8])


def test_under_the_whole_job_policy_a_plan_for_one_member_is_measured_by_that_member() -> None:
    story = running("whole-job").fault("supervisor/0#1", 4.0).verdict("supervisor/0#1", 4.1)
    story.plan("supervisor/0#1", 4.2, "spawn supervisor/0").starts("supervisor/0#2", 5.0, 5.0, 5.0).ends(10.0)
    assert one(story).mttr_s == pytest.approx(1.0)


def test_a_standby_that_is_struck_is_back_when_it_stands_by() -> None:
    story = running().starts("standby/0#1", 1.0).fault("standby/0#1", 4.0).verdict("standby/0#1", 4.5)
    story.plan("standby/0#1", 4.5).starts("standby/0#2", 6.0).ends(10.0)
    assert one(story).mttr_s == 2.0


def test_a_member_replaced_without_a_failure_of_its_own_is_a_bystander() -> None:
    story = running().fault("trainer/0#1", 4.0).starts("trainer/0#2", 5, 5, 5).starts("rollout/0#2", 5, 5, 5)
    story.starts("standby/0#1", 1.0).starts("standby/0#2", 5.0).ends(10.0)
    assert bystander_restarts(story.events) == 1


def test_a_promotion_and_the_refill_of_the_pool_strike_no_bystander() -> None:
    rows = recoveries(realistic_run())
    assert bystander_restarts(realistic_run()) == 0
    assert [(row.kind, row.role) for row in rows] == [
        ("kill", "rollout"),
        ("kill", "trainer"),
        ("stop", "rollout"),
        ("kill", "manager"),
        ("kill", "supervisor"),
    ]


@settings(max_examples=150, deadline=None)
@given(st.lists(any_event, max_size=40))
def test_whatever_the_log_says_the_parts_add_up_to_the_mttr(drawn: list[Event]) -> None:
    for row in recoveries(any_log(drawn)):
        known = [part for part in parts(row) if part is not None]
        assert all(part >= 0 for part in known)
        if row.mttr_s is not None:
            assert len(known) == 5
            assert sum(known) == pytest.approx(row.mttr_s)
