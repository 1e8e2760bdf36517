"""The judge and the monitor on a virtual clock: no verdict without evidence, and no patience without an end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robustrl.config import DetectConfig
from robustrl.detect import Limits, MemberView, Monitor, Verdict, judge
from robustrl.detect.limits import DEFAULTS
from robustrl.detect.monitor import MAX_FORGIVEN
from robustrl.roles import Identity, Member, Phase

CONFIG = DetectConfig(
    heartbeat_s=0.25, silence_s=3.0, start_s=60.0, limits={"generate": 20.0, "trainer.train": 30.0, "brew": 5.0}
)
LIMITS = Limits(CONFIG)
TRAINER = Identity(Member("trainer"), 1)
ROLLOUT = Identity(Member("rollout", 1), 3)

phases = st.sampled_from([*Phase, "brew", "a phase of the framework's own"])
times = st.floats(0.0, 2000.0, allow_nan=False)
views = st.builds(
    MemberView,
    identity=st.sampled_from([TRAINER, ROLLOUT, Identity(Member("manager"), 1), Identity(Member("reward", 2), 1)]),
    spawned_at=times,
    heard_at=st.none() | times,
    phase=phases,
    phase_at=times,
    step=st.integers(-1, 9),
    moves=st.integers(0, 9),
    moved_at=times,
    active=st.integers(0, 3),
    exited=st.sampled_from(["", "", "killed by SIGKILL", "exited with code 0"]),
    failure=st.sampled_from(["", "", "", "Traceback: ValueError"]),
)


# -- one view -----------------------------------------------------------------------------------------------------


@given(views, times)
def test_every_failed_verdict_has_a_signal_and_evidence_that_is_true(view: MemberView, now: float) -> None:
    found = judge(view, LIMITS, now)
    assert found.evidence
    if not found.verdict.failed:
        return
    silent = None if view.heard_at is None else now - view.heard_at
    if found.signal == "report":
        assert view.failure and view.failure in found.evidence
    elif found.signal == "exit":
        assert view.exited and view.exited in found.evidence
    elif found.signal == "start":
        assert silent is None and now - view.spawned_at > CONFIG.start_s
    elif found.signal == "silence":
        assert silent is not None and silent > CONFIG.silence_s
    else:
        assert found.signal == "no_progress"
        limit = LIMITS.progress_s(view.identity.member.role, view.phase)
        assert limit is not None and now - view.moved_at > limit and now - view.phase_at > limit


@given(views, times)
def test_waiting_and_idling_is_never_hung_for_want_of_progress(view: MemberView, now: float) -> None:
    for phase in (Phase.WAIT, Phase.IDLE):
        view.phase = phase
        assert judge(view, LIMITS, now).signal != "no_progress"


@given(views, times)
def test_a_rollout_without_requests_owes_no_tokens(view: MemberView, now: float) -> None:
    view.identity, view.phase, view.active = ROLLOUT, Phase.GENERATE, 0
    assert judge(view, LIMITS, now).signal != "no_progress"


@given(views, times, st.sampled_from(["exited with code 0", "killed by SIGKILL", "ended (exit status unknown)"]))
def test_an_end_without_the_members_own_word_is_a_failure_whatever_its_code(
    view: MemberView, now: float, how: str
) -> None:
    view.exited, view.failure = how, ""
    assert judge(view, LIMITS, now).verdict is Verdict.DEAD


def test_its_own_report_comes_before_everything_else() -> None:
    view = MemberView(TRAINER, 0.0, heard_at=0.0, exited="exited with code 1", failure="ValueError: no")
    found = judge(view, LIMITS, 1000.0)
    assert (found.verdict, found.signal, found.evidence) == (Verdict.DEAD, "report", "ValueError: no")


@pytest.mark.parametrize(
    ("identity", "phase", "still", "verdict"),
    [
        (ROLLOUT, "generate", 9.0, Verdict.HEALTHY),
        (ROLLOUT, "generate", 11.0, Verdict.SLOW),
        (ROLLOUT, "generate", 21.0, Verdict.HUNG),
        (TRAINER, "train", 29.0, Verdict.SLOW),
        (TRAINER, "train", 31.0, Verdict.HUNG),
        (ROLLOUT, "train", 31.0, Verdict.HEALTHY),  # the limit of this phase is the trainer's own
        (ROLLOUT, "brew", 6.0, Verdict.HUNG),
        (ROLLOUT, "unheard of", 1e6, Verdict.HEALTHY),
    ],
)
def test_limits_are_a_matter_of_role_and_phase(identity: Identity, phase: str, still: float, verdict: Verdict) -> None:
    view = MemberView(identity, 0.0, heard_at=still, phase=phase, active=1)
    assert judge(view, LIMITS, still).verdict is verdict


def test_half_the_silence_is_suspect_and_all_of_it_is_hung() -> None:
    view = MemberView(TRAINER, 0.0, heard_at=0.0, phase=Phase.WAIT)
    assert [judge(view, LIMITS, now).verdict for now in (1.0, 2.0, 3.5)] == [
        Verdict.HEALTHY,
        Verdict.SUSPECT,
        Verdict.HUNG,
    ]


def test_a_start_has_a_limit_of_its_own() -> None:
    view = MemberView(TRAINER, 10.0)
    assert judge(view, LIMITS, 69.0).verdict is Verdict.UNKNOWN
    found = judge(view, LIMITS, 71.0)
    assert (found.verdict, found.signal) == (Verdict.HUNG, "start")


def test_the_configuration_comes_before_the_defaults_and_the_role_before_the_phase() -> None:
    limits = Limits(DetectConfig(limits={"generate": 7.0, "rollout.generate": 9.0}))
    assert limits.progress_s("rollout", "generate") == 9.0
    assert limits.progress_s("hybrid", "generate") == 7.0
    assert limits.progress_s("trainer", "train") == DEFAULTS["train"]
    assert limits.progress_s("trainer", "wait") is None


# -- the monitor --------------------------------------------------------------------------------------------------


class Clock:
    """A monitor and its time."""

    def __init__(self, *identities: Identity) -> None:
        self.now = 1000.0
        self.monitor = Monitor(LIMITS, CONFIG.heartbeat_s)
        self.moves = 0
        for identity in identities:
            self.monitor.watch(identity, self.now)

    def beat(self, identity: Identity, **changes: Any) -> None:
        self.moves += 1
        said: dict[str, Any] = {"phase": "generate", "step": 1, "moves": self.moves, "active": 1}
        self.monitor.beat(identity, self.now, **(said | changes))

    def tick(self, after: float = CONFIG.heartbeat_s) -> list[Verdict]:
        self.now += after
        return [judgement.verdict for _, judgement in self.monitor.tick(self.now)]


@given(st.lists(st.tuples(st.floats(0.01, 0.5), phases, st.booleans()), min_size=1, max_size=60))
def test_who_speaks_and_moves_is_never_condemned(story: list[tuple[float, str, bool]]) -> None:
    clock = Clock(TRAINER, ROLLOUT)
    for after, phase, busy in story:
        clock.beat(TRAINER, phase=phase)
        clock.beat(ROLLOUT, phase=phase, active=int(busy))
        assert clock.tick(after) == []


@given(st.lists(st.floats(0.01, 0.5), min_size=1, max_size=400))
def test_silence_is_condemned_on_time_by_a_punctual_monitor(ticks: list[float]) -> None:
    clock = Clock(ROLLOUT)
    clock.beat(ROLLOUT)
    heard = clock.now
    for after in ticks:
        condemned = clock.tick(after)
        assert bool(condemned) == (clock.now - heard > CONFIG.silence_s)


def test_work_that_does_not_move_is_hung_although_it_beats() -> None:
    clock = Clock(ROLLOUT)
    begun = clock.now
    while True:
        clock.beat(ROLLOUT, moves=5)
        if clock.tick():
            break
    assert 20.0 < clock.now - begun < 21.0


def test_work_that_becomes_due_starts_the_clock_then() -> None:
    clock = Clock(ROLLOUT)
    for _ in range(200):  # 50 s without a request
        clock.beat(ROLLOUT, moves=5, active=0)
        assert clock.tick() == []
    for _ in range(76):  # 19 s with one
        clock.beat(ROLLOUT, moves=5, active=1)
        assert clock.tick() == []


def test_a_stopped_monitor_does_not_take_its_own_sleep_for_the_silence_of_others() -> None:
    clock = Clock(ROLLOUT, TRAINER)
    for _ in range(8):
        clock.beat(ROLLOUT)
        clock.beat(TRAINER, phase="train")
        clock.tick()
    assert clock.tick(3600.0) == []
    clock.beat(ROLLOUT)
    clock.beat(TRAINER, phase="train")
    assert clock.tick() == []


def test_who_fell_silent_during_its_sleep_is_condemned_soon_after() -> None:
    clock = Clock(ROLLOUT)
    clock.beat(ROLLOUT)
    clock.tick()
    assert clock.tick(3600.0) == []
    woke = clock.now
    while not clock.tick():
        assert clock.now - woke < CONFIG.silence_s + 1.0


@given(st.lists(st.floats(3.6, 500.0), min_size=MAX_FORGIVEN + 1, max_size=MAX_FORGIVEN + 4))
def test_a_monitor_that_is_always_late_still_judges(lateness: list[float]) -> None:
    clock = Clock(ROLLOUT)
    clock.beat(ROLLOUT)
    clock.tick()
    found = [bool(clock.tick(after)) for after in lateness]
    assert not any(found[:1])
    assert any(found[: MAX_FORGIVEN + 1])


@given(st.data())
def test_the_order_of_members_within_a_tick_does_not_matter(data: st.DataObject) -> None:
    members = [Identity(Member("rollout", index), 1) for index in range(3)]
    one, two = Clock(*members), Clock(*members)
    counters = dict.fromkeys(members, 0)
    for _ in range(data.draw(st.integers(1, 12))):
        beats = []
        for member in data.draw(st.lists(st.sampled_from(members), unique=True)):
            counters[member] += data.draw(st.integers(0, 1))
            beats.append((member, {"moves": counters[member], "phase": data.draw(phases)}))
        for clock, order in ((one, beats), (two, data.draw(st.permutations(beats)))):
            for member, said in order:
                clock.beat(member, **said)
        after = data.draw(st.floats(0.05, 15.0))
        one.tick(after)
        two.tick(after)
        assert [one.monitor.verdict(m, one.now) for m in members] == [two.monitor.verdict(m, two.now) for m in members]


def test_an_adopted_member_has_the_silence_limit_and_not_that_of_a_start() -> None:
    clock = Clock()
    clock.monitor.watch(ROLLOUT, clock.now, adopted=True)
    begun = clock.now
    while not clock.tick():
        assert clock.now - begun < CONFIG.silence_s + 1.0


def test_who_is_not_watched_is_unknown_and_its_beats_are_nobodys() -> None:
    clock = Clock(ROLLOUT)
    clock.monitor.forget(ROLLOUT)
    clock.beat(ROLLOUT)
    clock.monitor.heard(ROLLOUT, clock.now)
    assert clock.monitor.verdict(ROLLOUT, clock.now).verdict is Verdict.UNKNOWN
    assert clock.tick(1e6) == []
