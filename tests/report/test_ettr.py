from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from story import Story, any_event, any_log, realistic_run

from robustrl.events import Event
from robustrl.report import ettr, regenerated_tokens

THREE = ("trainer/0", "rollout/0", "rollout/1")
FOUR = ("trainer/0", "rollout/0", "rollout/1", "rollout/2")


def test_a_run_without_faults_is_all_effective() -> None:
    found = ettr(Story(members=FOUR).everyone_serves(2.0).ends(12.0).events)
    assert (found.paper, found.strict, found.window_s) == (1.0, 1.0, 10.0)


def test_the_window_opens_when_the_last_member_serves() -> None:
    story = Story(members=THREE).starts("trainer/0#1", 1, 1, 1).starts("rollout/0#1", 1, 1, 2)
    assert ettr(story.starts("rollout/1#1", 1, 1, 5).ends(10).events).window_s == 5.0


def test_a_run_in_which_never_all_served_has_no_ettr() -> None:
    story = Story(members=THREE).starts("trainer/0#1", 1, 1, 1).starts("rollout/0#1", 1, 1, 2).ends(10)
    found = ettr(story.events)
    assert (found.paper, found.strict, found.window_s) == (0.0, 0.0, 0.0)


def test_while_the_trainer_recovers_rollouts_are_credited_by_their_share() -> None:
    story = Story(members=FOUR).everyone_serves(0.0).fault("trainer/0#1", 4.0).verdict("trainer/0#1", 4.5)
    found = ettr(story.starts("trainer/0#2", 5.0, 5.5, 6.0).ends(10.0).events)
    assert found.paper == pytest.approx((8 + 2 * 3 / 4) / 10)
    assert found.strict == pytest.approx((40 - 2) / 40)
    assert found.down_s == pytest.approx(2.0)


def test_an_isolated_rollout_replacement_costs_the_papers_ettr_nothing() -> None:
    story = Story(members=FOUR).everyone_serves(0.0).fault("rollout/1#1", 4.0)
    found = ettr(story.starts("rollout/1#2", 5.0, 5.5, 6.0).ends(10.0).events)
    assert found.paper == 1.0
    assert found.strict == pytest.approx(38 / 40)


def test_without_an_injected_fault_death_is_the_verdict() -> None:
    story = Story(members=FOUR).everyone_serves(0.0).verdict("rollout/1#1", 4.0, "hung")
    found = ettr(story.starts("rollout/1#2", 5.0, 5.5, 6.0).ends(10.0).events)
    assert found.down_s == pytest.approx(2.0)


def test_a_mere_suspicion_ends_no_life() -> None:
    story = Story(members=FOUR).everyone_serves(0.0).verdict("rollout/1#1", 4.0, "suspect").ends(10.0)
    assert ettr(story.events).strict == 1.0


def test_a_whole_job_restart_credits_nothing_while_nothing_serves() -> None:
    story = Story("whole-job", THREE).everyone_serves(0.0).fault("rollout/0#1", 4.0).verdict("rollout/0#1", 4.5)
    story.plan("rollout/0#1", 5.0, "restart the whole job")
    story.starts("trainer/0#2", 6, 6.5, 7).starts("rollout/0#2", 6, 6.5, 8).starts("rollout/1#2", 6, 6.5, 8)
    found = ettr(story.ends(10.0).events)
    # 0-4 all, 4-5 trainer and one rollout (1), 5-7 nothing, 7-8 the trainer alone (1/3), 8-10 all.
    assert found.paper == pytest.approx((5 + 0 + 1 / 3 + 2) / 10)
    # Down: the trainer 5-7, the struck rollout 4-8, the other one 5-8.
    assert found.strict == pytest.approx((30 - 2 - 4 - 3) / 30)


def steps_with_a_kill(*, batch_kept: bool) -> Story:
    """Step 1 done; step 2 waits 1 s, trains 2 s and dies. The next incarnation waits 1 s or not at all, and trains."""
    story = Story(members=THREE).everyone_serves(0.0)
    story.phase("trainer/0#1", 0.0, "wait", 1).phase("trainer/0#1", 1.0, "train", 1).step_done(1, 3.0)
    story.phase("trainer/0#1", 3.0, "wait", 2).phase("trainer/0#1", 4.0, "train", 2)
    story.fault("trainer/0#1", 6.0, step=2).starts("trainer/0#2", 6.5, 6.8, 7.0)
    train = 7.0 if batch_kept else 8.0
    story.phase("trainer/0#2", 7.0, "wait", 2).phase("trainer/0#2", train, "train", 2).step_done(2, train + 2.5, 2)
    return story.ends(12.0)


def test_a_step_in_progress_at_death_is_waste_but_a_wait_that_is_not_repeated_is_not() -> None:
    kept = ettr(steps_with_a_kill(batch_kept=True).events)
    assert kept.redone_trainer_s == pytest.approx(2.0)
    assert kept.strict == pytest.approx((36 - 1 - 2) / 36)
    assert ettr(steps_with_a_kill(batch_kept=False).events).redone_trainer_s == pytest.approx(3.0)


def test_a_step_that_was_done_and_is_done_again_is_waste() -> None:
    story = Story(members=THREE).everyone_serves(0.0)
    story.phase("trainer/0#1", 0.0, "train", 1).step_done(1, 2.0).phase("trainer/0#1", 2.0, "train", 2)
    story.step_done(2, 5.0).phase("trainer/0#1", 5.0, "checkpoint", 2).fault("trainer/0#1", 5.5, step=2)
    story.starts("trainer/0#2", 6, 6, 6).phase("trainer/0#2", 6.0, "train", 2).step_done(2, 9.0, 2).ends(10.0)
    assert ettr(story.events).redone_trainer_s == pytest.approx(3.5)


def test_a_trainer_that_declares_no_phases_is_measured_from_step_to_step() -> None:
    story = Story(members=THREE).everyone_serves(0.0).step_done(1, 2.0).step_done(2, 5.0).fault("trainer/0#1", 6.0)
    story.starts("trainer/0#2", 7, 7, 7).step_done(2, 9.0, 2).step_done(3, 11.0, 2).ends(12.0)
    # Step 2 (3 s) was done twice, step 3 (1 s) was in work at death.
    assert ettr(story.events).redone_trainer_s == pytest.approx(4.0)


def test_lost_tokens_cost_the_time_that_the_run_needs_for_as_many() -> None:
    story = Story(members=THREE).everyone_serves(0.0).fault("rollout/0#1", 5.0).starts("rollout/0#2", 5, 5, 5)
    # 500 tokens in 5 s: 100 tokens a second.
    story.tokens("rollout/0#1", 5.0, made=500, kept=450).dropped(6.0, 50)
    found = ettr(story.ends(10.0).events)
    assert regenerated_tokens(story.events) == 100
    assert found.redone_rollout_s == pytest.approx(1.0)
    assert found.strict == pytest.approx(29 / 30)


def test_only_dead_incarnations_regenerate_and_never_less_than_nothing() -> None:
    story = Story(members=THREE).everyone_serves(0.0).tokens("rollout/1#1", 9.0, made=900)
    story.fault("rollout/0#1", 5.0).tokens("rollout/0#1", 5.0, made=10, kept=12).ends(10.0)
    assert regenerated_tokens(story.events) == 0


def test_a_realistic_run_loses_little() -> None:
    found = ettr(realistic_run())
    assert 0.9 < found.strict < found.paper < 1.0


@settings(max_examples=150, deadline=None)
@given(st.lists(any_event, max_size=40))
def test_whatever_the_log_says_both_ratios_are_ratios(drawn: list[Event]) -> None:
    found = ettr(any_log(drawn))
    assert 0.0 <= found.strict <= 1.0
    assert 0.0 <= found.paper <= 1.0
    assert min(found.down_s, found.redone_trainer_s, found.redone_rollout_s) >= 0.0
