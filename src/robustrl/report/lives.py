"""The lives that a log tells of: when each incarnation began, came to serve, and ended. All reports stand on this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from robustrl.events import (
    Event,
    FaultInjected,
    JobEnded,
    JobStarted,
    MemberMoved,
    MemberReady,
    PhaseEntered,
    PlanMade,
    StepDone,
    VerdictReached,
    of_kind,
)
from robustrl.roles import ROLLOUT, STANDBY, TRAINER, Member

WORKERS = (TRAINER, ROLLOUT)
"""The roles whose time is counted: management roles cost the job nothing but the time that they hold these up."""

ENDED = ("dead", "promoted")
"""States of a member in which its incarnation is over before the job is."""

NOT_FAILED = ("healthy", "slow", "suspect", "unknown")
"""Verdicts that end no life."""


class PhaseSpan(msgspec.Struct, frozen=True):
    """A member was in `phase` from `start` to `end` (seconds since the epoch)."""

    start: float
    end: float
    phase: str
    step: int


class Life(msgspec.Struct):
    """One incarnation of a member. Times are seconds since the epoch; None means that it did not happen."""

    member: str
    incarnation: int
    began: float
    """The first event about it."""
    pid: int = 0
    attached: float | None = None
    reloaded: float | None = None
    serving: float | None = None
    fault: FaultInjected | None = None
    verdict: VerdictReached | None = None
    plan: PlanMade | None = None
    ended: float | None = None
    """When it stopped being of use: its fault, else its verdict, else its promotion or the move that buried it, else
    the plan that replaced it."""
    promoted_to: str = ""
    """For a standby: the identity that its process took over."""
    spans: list[PhaseSpan] = []

    @property
    def identity(self) -> str:
        return f"{self.member}#{self.incarnation}"

    @property
    def role(self) -> str:
        return role_of(self.member)


def role_of(member: str) -> str:
    return member.partition("/")[0]


def member_order(member: str) -> tuple[int, int]:
    """Sorts members the way people tell of them: trainer, rollouts, manager, supervisor, others, standbys."""
    order = {TRAINER: 0, ROLLOUT: 1, "manager": 2, "supervisor": 3, STANDBY: 5}
    parsed = Member.parse(member)
    return order.get(parsed.role, 4), parsed.index


def failed(verdict: VerdictReached) -> bool:
    """Whether the verdict condemns the incarnation."""
    return verdict.verdict not in NOT_FAILED


def job_span(events: Sequence[Event]) -> tuple[float, float]:
    """From JobStarted to JobEnded; a log that lacks one of them is taken from its first or to its last event."""
    if not events:
        return 0.0, 0.0
    start = next((event.t for event in of_kind(events, JobStarted)), min(event.t for event in events))
    end = next((event.t for event in of_kind(reversed(events), JobEnded)), max(event.t for event in events))
    return start, max(start, end)


def members_of(events: Sequence[Event], lives: Iterable[Life]) -> list[str]:
    """Members that the job names, or, where the log has lost its beginning, those that it speaks of."""
    named = next((event.members for event in of_kind(events, JobStarted)), ())
    return sorted({*named, *(life.member for life in lives)}, key=member_order)


def last_steps(events: Iterable[Event]) -> dict[int, StepDone]:
    """The last StepDone of each step, by step: what remained after re-execution."""
    done = {event.step: event for event in of_kind(events, StepDone)}
    return dict(sorted(done.items()))


def read_lives(events: Sequence[Event]) -> list[Life]:
    """Reconstructs every incarnation, ordered by member and incarnation.

    Args:
        events: a log in time order.
    """
    _, end = job_span(events)
    lives: dict[tuple[str, int], Life] = {}
    buried: dict[tuple[str, int], float] = {}
    phases: dict[tuple[str, int], list[PhaseEntered]] = {}

    def life(member: str, incarnation: int, t: float) -> Life:
        key = (member, incarnation)
        if key not in lives:
            lives[key] = Life(member, incarnation, t)
        return lives[key]

    for event in events:
        if event.t > end:
            continue
        match event:
            case MemberMoved():
                found = life(event.member, event.incarnation, event.t)
                found.pid = event.pid or found.pid
                if event.after in ENDED:
                    buried.setdefault((event.member, event.incarnation), event.t)
            case PhaseEntered():
                life(event.member, event.incarnation, event.t)
                phases.setdefault((event.member, event.incarnation), []).append(event)
            case MemberReady():
                found = life(event.member, event.incarnation, event.t)
                if event.milestone in ("attached", "reloaded", "serving") and getattr(found, event.milestone) is None:
                    setattr(found, event.milestone, event.t)
            case FaultInjected():
                found = life(event.member, event.incarnation, event.t)
                found.fault = found.fault or event
                found.pid = event.pid or found.pid
            case VerdictReached() if failed(event):
                found = life(event.member, event.incarnation, event.t)
                found.verdict = found.verdict or event
            case PlanMade():
                found = life(event.member, event.incarnation, event.t)
                found.plan = found.plan or event
            case _:
                pass

    _end_lives(lives, buried, [event.t for event in of_kind(events, PlanMade)])
    for key, entered in phases.items():
        lives[key].spans = _spans(entered, lives[key].ended or end)
    return [lives[key] for key in sorted(lives, key=lambda key: (member_order(key[0]), key[1]))]


def _end_lives(
    lives: Mapping[tuple[str, int], Life], buried: Mapping[tuple[str, int], float], plans: Sequence[float]
) -> None:
    by_member: dict[str, list[Life]] = {}
    for life in sorted(lives.values(), key=lambda life: life.incarnation):
        by_member.setdefault(life.member, []).append(life)
    by_pid = {life.pid: life for life in lives.values() if life.pid and life.role != STANDBY}
    for chain in by_member.values():
        for life, successor in zip(chain, [*chain[1:], None], strict=True):
            if life.fault is not None:
                life.ended = life.fault.t
            elif life.verdict is not None:
                life.ended = life.verdict.t
            elif life.role == STANDBY and life.pid in by_pid:
                life.ended = by_pid[life.pid].began
                life.promoted_to = by_pid[life.pid].identity
            elif (life.member, life.incarnation) in buried:
                life.ended = buried[life.member, life.incarnation]
            elif successor is not None:
                # Replaced without a failure of its own: nobody reports the moment, but a plan is what did it.
                life.ended = max((t for t in plans if life.began < t <= successor.began), default=successor.began)


def _spans(entered: Sequence[PhaseEntered], end: float) -> list[PhaseSpan]:
    ends = [*(event.t for event in entered[1:]), end]
    return [
        PhaseSpan(event.t, min(until, end), event.phase, event.step)
        for event, until in zip(entered, ends, strict=True)
        if event.t < min(until, end)
    ]
