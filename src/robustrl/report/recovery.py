"""Recoveries: every fault with what brought the member back, how long it took, and where that time went.

A recovery runs through six moments: fault, verdict, plan, attached, reloaded, serving. Its parts are the five times
between them (detect, plan, restart, reload, reconnect), so they add up to the MTTR. A moment that nobody wrote down
takes no time of its own: it falls on the next one that is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from robustrl.events import Event, FaultInjected, JobStarted, PlanMade, StepDone, VerdictReached, of_kind
from robustrl.report.lives import WORKERS, Life, failed, job_span, members_of, read_lives, role_of
from robustrl.roles import MANAGER, ROLLOUT, STANDBY, SUPERVISOR, TRAINER

WHOLE_JOB = "whole job"
"""What a plan's action says when it restarts everything."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One failure and its end. All `_s` are seconds; None means that the log does not reach that far."""

    role: str
    member: str
    incarnation: int
    """The incarnation that failed."""
    kind: str
    """How it failed: the injected fault's kind, or, where nobody injected one, the verdict."""
    step: int
    """The step in work at the time."""
    t: float
    """When it failed, seconds since the epoch (the verdict's time where nobody injected it)."""
    mttr_s: float | None = None
    detect_s: float | None = None
    plan_s: float | None = None
    restart_s: float | None = None
    reload_s: float | None = None
    reconnect_s: float | None = None
    successor: int | None = None
    """The first later incarnation that served: the one that ended this recovery."""


def recoveries(events: Sequence[Event]) -> list[Recovery]:
    """All failures of a run in time order, injected or not, each with its recovery.

    When the plan restarts the whole job, be it by policy or by escalation, a recovery lasts until the last trainer or
    rollout serves again. A member that is struck again while it recovers gets a second row; the first row then lasts
    until it serves at last.
    """
    lives = read_lives(events)
    _, end = job_span(events)
    rows: list[Recovery] = []
    struck = {f"{event.member}#{event.incarnation}" for event in of_kind(events, FaultInjected)}
    for life in lives:
        if life.verdict is not None and life.identity not in struck:
            step = _step_at(events, life.verdict.t)
            rows.append(_recovery(events, lives, life, kind=life.verdict.verdict, step=step))
    by_identity = {life.identity: life for life in lives}
    for fault in of_kind(events, FaultInjected):
        if fault.t <= end:
            life = by_identity[f"{fault.member}#{fault.incarnation}"]
            step = fault.step if fault.step >= 0 else _step_at(events, fault.t)
            rows.append(_recovery(events, lives, life, kind=fault.kind, step=step, fault_t=fault.t))
    return sorted(rows, key=lambda row: row.t)


def bystander_restarts(events: Sequence[Event]) -> int:
    """New incarnations of trainers, rollouts, managers and supervisors that took the place of one which had neither a
    fault nor a verdict of its own. Zero is what role isolation means."""
    restarts = 0
    last: dict[str, Life] = {}
    for life in read_lives(events):
        before = last.get(life.member)
        if before is not None and life.role in (TRAINER, ROLLOUT, MANAGER, SUPERVISOR):
            restarts += before.fault is None and before.verdict is None
        last[life.member] = life
    return restarts


def _recovery(
    events: Sequence[Event], lives: Sequence[Life], life: Life, *, kind: str, step: int, fault_t: float | None = None
) -> Recovery:
    verdict = next((e for e in of_kind(events, VerdictReached) if _about(e, life) and failed(e)), None)
    start = fault_t if fault_t is not None else verdict.t if verdict is not None else life.began
    verdict_t = verdict.t if verdict is not None else None
    plan = _plan(events, life, start if verdict_t is None else verdict_t)
    plan_t = plan.t if plan is not None else None
    if plan is not None and _restarts_all(plan):
        back = _everyone_after(events, lives, plan.t)
    else:
        back = [_next_serving(lives, life)]
    attached, reloaded, serving = _milestones(back)
    moments = _in_order([verdict_t, plan_t, attached, reloaded, serving], start)
    parts = [None if left is None or right is None else right - left for left, right in pairwise(moments)]
    own = next((other for other in back if other is not None and other.member == life.member), None)
    return Recovery(
        role=life.role,
        member=life.member,
        incarnation=life.incarnation,
        kind=kind,
        step=step,
        t=start,
        mttr_s=None if moments[-1] is None else moments[-1] - start,
        detect_s=parts[0],
        plan_s=parts[1],
        restart_s=parts[2],
        reload_s=parts[3],
        reconnect_s=parts[4],
        successor=own.incarnation if own is not None and serving is not None else None,
    )


def _plan(events: Iterable[Event], life: Life, since: float) -> PlanMade | None:
    """The plan for this very failure, or the restart of the whole job that another one led to before it was judged."""
    plans = [event for event in of_kind(events, PlanMade) if event.t >= since]
    own = next((event for event in plans if _about(event, life)), None)
    return own or (next((event for event in plans if _restarts_all(event)), None) if life.verdict is None else None)


def _restarts_all(plan: PlanMade) -> bool:
    return any(WHOLE_JOB in action for action in plan.actions)


def _about(event: VerdictReached | PlanMade, life: Life) -> bool:
    return event.member == life.member and event.incarnation == life.incarnation


def _serving(life: Life) -> float | None:
    """A standby serves by standing by: the last milestone that it says is the one that counts."""
    if life.role != STANDBY or life.serving is not None:
        return life.serving
    return life.reloaded if life.reloaded is not None else life.attached


def _next_serving(lives: Iterable[Life], life: Life) -> Life | None:
    later = (o for o in lives if o.member == life.member and o.incarnation > life.incarnation)
    return next((other for other in later if _serving(other) is not None), None)


def _everyone_after(events: Sequence[Event], lives: Sequence[Life], t: float) -> list[Life | None]:
    """Each trainer's and rollout's first life after `t` that served; None for one that did not come back."""
    members = [member for member in members_of(events, lives) if role_of(member) in WORKERS]
    return [
        next((life for life in lives if life.member == member and life.began >= t and life.serving is not None), None)
        for member in members
    ]


def _milestones(back: Sequence[Life | None]) -> tuple[float | None, float | None, float | None]:
    """When the last of them was attached, reloaded and serving; all None when one did not come back."""
    lives = [life for life in back if life is not None]
    if not lives or len(lives) < len(back):
        return None, None, None
    attached = [life.attached for life in lives if life.attached is not None]
    reloaded = [life.reloaded for life in lives if life.reloaded is not None]
    serving = [t for life in lives if (t := _serving(life)) is not None]
    return max(attached, default=None), max(reloaded, default=None), max(serving, default=None)


def _in_order(moments: Sequence[float | None], start: float) -> list[float | None]:
    """Fills a missing moment from the next one that is known, and lets none lie after its successor."""
    filled: list[float | None] = [start, *moments]
    for i in range(len(filled) - 2, 0, -1):
        after, own = filled[i + 1], filled[i]
        if after is not None:
            filled[i] = after if own is None else min(own, after)
    return [None if moment is None else max(moment, start) for moment in filled]


def _step_at(events: Iterable[Event], t: float) -> int:
    """The step in work at `t`: one more than the last that was done; -1 before the job began."""
    if not any(event.t <= t for event in of_kind(events, JobStarted)):
        return -1
    return max((event.step for event in of_kind(events, StepDone) if event.t <= t), default=0) + 1
