from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robustrl.errors import ConfigError
from robustrl.inject import Fault, check, default_schedule, parse, random_schedule, to_text
from robustrl.inject.schedule import TRAINER_PHASES
from robustrl.roles import Member

MEMBERS = [Member("trainer"), *(Member("rollout", i) for i in range(3)), Member("manager"), Member("supervisor")]

names = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True)
moments = st.one_of(
    st.just(("", "")), st.tuples(st.sampled_from(["in", "before", "after"]), st.sampled_from(TRAINER_PHASES))
)
faults = st.builds(
    lambda step, member, action, moment, ms: Fault(step, member, action, *moment, ms / 1000),
    st.integers(0, 10**6),
    st.builds(Member, names, st.integers(0, 999)),
    st.sampled_from(["kill", "stop", "term"]),
    moments,
    st.integers(0, 10**6),
)


@given(st.lists(faults, max_size=6))
def test_what_a_schedule_prints_it_reads_back(schedule: list[Fault]) -> None:
    assert parse(to_text(schedule)) == tuple(schedule)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill rollout/1 at step 4", Fault(4, Member("rollout", 1))),
        ("stop rollout/0 at step 8", Fault(8, Member("rollout", 0), "stop")),
        ("kill trainer at step 10 in checkpoint", Fault(10, Member("trainer"), "kill", "in", "checkpoint")),
        ("kill trainer at step 12 after generate", Fault(12, Member("trainer"), "kill", "after", "generate")),
        ("kill supervisor at step 3 after 0.5 s", Fault(3, Member("supervisor"), delay_s=0.5)),
        ("term manager at step 3 +0.25s", Fault(3, Member("manager"), "term", delay_s=0.25)),
        ("  kill trainer  at step 2 in train +1 s ", Fault(2, Member("trainer"), "kill", "in", "train", 1.0)),
    ],
)
def test_the_grammar(text: str, fault: Fault) -> None:
    assert parse(text) == (fault,)


def test_faults_are_separated_by_semicolons_or_lines() -> None:
    assert len(parse("kill trainer at step 1; stop rollout/0 at step 2\nterm manager at step 3;")) == 3
    assert parse("") == ()


@pytest.mark.parametrize(
    "text",
    [
        "kill trainer",
        "kill trainer at step",
        "kill trainer at step four",
        "kill trainer at step -1",
        "maim trainer at step 1",
        "kill Trainer! at step 1",
        "kill trainer at step 1 during train",
        "kill trainer at step 1 in",
        "kill trainer at step 1 +s",
    ],
)
def test_what_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"kill rollout/0 at step 1; {text}")
    assert text.split()[1] in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill rolout/1 at step 4", "manager, rollout, supervisor, trainer"),
        ("kill rollout/7 at step 4", "rollout/0, rollout/1, rollout/2"),
        ("kill trainer at step 10", "step 1 to 9"),
        ("kill trainer at step 0", "step 1 to 9"),
        ("kill trainer at step 4; kill trainer/0 at step 4", "twice"),
    ],
)
def test_a_schedule_that_the_job_cannot_run_is_refused_with_the_fault_named(text: str, says: str) -> None:
    schedule = parse(text)
    with pytest.raises(ConfigError) as caught:
        check(schedule, MEMBERS, 10)
    assert says in str(caught.value)
    assert str(schedule[-1]) in str(caught.value)


@given(st.integers(6, 200), st.integers(1, 8))
def test_the_default_schedule_strikes_every_role_once_at_steps_of_their_own(steps: int, rollouts: int) -> None:
    schedule = default_schedule(steps, rollouts)
    check(schedule, [Member("trainer"), Member("manager"), Member("supervisor"), *_rollouts(rollouts)], steps)
    assert len({fault.step for fault in schedule}) == 5
    struck = sorted((fault.action, fault.member.role) for fault in schedule)
    assert struck == [
        ("kill", "manager"),
        ("kill", "rollout"),
        ("kill", "supervisor"),
        ("kill", "trainer"),
        ("stop", "rollout"),
    ]


def test_a_run_too_short_for_the_default_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 6 steps"):
        default_schedule(5, 3)


@given(st.integers(0, 2**32), st.integers(7, 60), st.integers(1, 5))
def test_drawn_schedules_can_be_run_and_repeated(seed: int, steps: int, count: int) -> None:
    schedule = random_schedule(random.Random(seed), steps=steps, rollouts=3, faults=count)
    check(schedule, MEMBERS, steps)
    assert schedule == random_schedule(random.Random(seed), steps=steps, rollouts=3, faults=count)
    assert len({fault.step for fault in schedule}) == count
    assert min(fault.step for fault in schedule) >= 2
    assert any(fault.member.role == "trainer" and fault.phase in TRAINER_PHASES for fault in schedule)


def test_draws_reach_every_boundary_of_the_trainers_step() -> None:
    rng = random.Random(1)
    drawn = {
        (fault.moment, fault.phase)
        for _ in range(200)
        for fault in random_schedule(rng, steps=10, rollouts=3, faults=3)
        if fault.member.role == "trainer"
    }
    assert drawn == {(moment, phase) for moment in ("in", "before", "after") for phase in TRAINER_PHASES}


def _rollouts(count: int) -> list[Member]:
    return [Member("rollout", i) for i in range(count)]
