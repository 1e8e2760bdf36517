"""ETTR, the effective training time ratio: how much of a run's time was of use. Two definitions, side by side.

Both look at one window: from the first moment at which every trainer and rollout member serves to the end of the job.
A member is *up* from its incarnation's ``serving`` milestone to its death: the injected fault where there was one (a
stopped process is useless from that moment, not from the moment that somebody notices), else the verdict, else the
plan that replaced it.

**The paper's** (RobustRL, arXiv 2512.22492). Actor update and rollout are both effective time. With T trainers and R
rollouts in the job:

- every trainer up and at least one rollout up: credit 1. Replacing a rollout in isolation does not affect the job;
- a trainer down: credit r / (R + T) with r rollouts up. That is the paper's R / (R + T) while only the trainer
  recovers, and 0 while nothing serves, as in a whole-job restart;
- trainers up and no rollout up: credit T / (R + T), by the same rule.

Work that is executed again counts as effective, as in the paper, which flatters a whole-job restart.

**The strict one.** Member-seconds up, less work that was done twice or thrown away, over members x window:

- trainer: a step's execution is lost when it was in progress at death, or when a later incarnation finished the same
  step. All of its time is waste except waiting for the batch, which is waste only so far as the next execution of
  the step had to wait again (a batch that persists makes the first wait worth its time);
- rollouts: tokens that were generated but not kept, or dropped (`regenerated_tokens`), at the run's own tokens per
  second of generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from robustrl.events import Event, Progress, StepDone, TokensDropped, TokensKept, of_kind
from robustrl.report.lives import WORKERS, Life, PhaseSpan, job_span, members_of, read_lives, role_of
from robustrl.roles import ROLLOUT, TRAINER, Phase

Interval = tuple[float, float]


class Ettr(msgspec.Struct, frozen=True):
    """Ratios from 0 to 1, and what they were made of."""

    paper: float
    strict: float
    window_s: float
    """0 when there was no moment at which every trainer and rollout served; both ratios are 0 then."""
    down_s: float = 0.0
    """Member-seconds of trainers and rollouts that were not up."""
    redone_trainer_s: float = 0.0
    redone_rollout_s: float = 0.0


def ettr(events: Sequence[Event]) -> Ettr:
    """Both ratios of a run, or of a run so far (its last event is the end then).

    Args:
        events: a log in time order.
    """
    lives = read_lives(events)
    _, end = job_span(events)
    up = _up(events, lives, end)
    start = _all_up(up)
    if start is None or start >= end:
        return Ettr(0.0, 0.0, 0.0)
    window = (start, end)
    up = {member: [cut for span in spans if (cut := _cut(span, window))] for member, spans in up.items()}
    up_s = {role: _total(span for member in up if role_of(member) == role for span in up[member]) for role in WORKERS}
    total_s = len(up) * (end - start)
    trainer_s = min(_lost_steps_s(events, lives, up), up_s[TRAINER])
    rollout_s = min(_lost_tokens_s(events, lives, end), up_s[ROLLOUT])
    useful_s = sum(up_s.values()) - trainer_s - rollout_s
    return Ettr(
        paper=_ratio(_paper_credit(up, window), end - start),
        strict=_ratio(useful_s, total_s),
        window_s=end - start,
        down_s=max(0.0, total_s - sum(up_s.values())),
        redone_trainer_s=trainer_s,
        redone_rollout_s=rollout_s,
    )


def regenerated_tokens(events: Sequence[Event]) -> int:
    """Tokens that were generated for nothing: made by an incarnation that died and never kept, or kept and dropped.

    An incarnation whose kept tokens nobody stated has kept none.
    """
    kept: dict[str, int] = {event.owner: event.tokens for event in of_kind(events, TokensKept)}
    made = _tokens_made(events)
    dead = [life.identity for life in read_lives(events) if life.ended is not None]
    lost = sum(max(0, made.get(identity, 0) - kept.get(identity, 0)) for identity in dead)
    return lost + sum(event.tokens for event in of_kind(events, TokensDropped))


def _tokens_made(events: Iterable[Event]) -> dict[str, int]:
    """By identity; rollouts only."""
    made: dict[str, int] = {}
    for event in of_kind(events, Progress):
        if role_of(event.member) == ROLLOUT:
            identity = f"{event.member}#{event.incarnation}"
            made[identity] = max(event.tokens, made.get(identity, 0))
    return made


def _up(events: Sequence[Event], lives: Sequence[Life], end: float) -> dict[str, list[Interval]]:
    """Up times of each trainer and rollout; a member that never served has none."""
    up: dict[str, list[Interval]] = {m: [] for m in members_of(events, lives) if role_of(m) in WORKERS}
    for life in lives:
        if life.member in up and life.serving is not None:
            until = end if life.ended is None else life.ended
            if until > life.serving:
                up[life.member].append((life.serving, until))
    # Incarnations of one member exclude each other, whatever a stray event of an old one says.
    for spans in up.values():
        spans.sort()
        for i in range(1, len(spans)):
            spans[i - 1] = (spans[i - 1][0], min(spans[i - 1][1], spans[i][0]))
    return up


def _all_up(up: dict[str, list[Interval]]) -> float | None:
    starts = sorted(start for spans in up.values() for start, _ in spans)
    for t in starts:
        if all(any(start <= t < until for start, until in spans) for spans in up.values()):
            return t
    return None


def _paper_credit(up: dict[str, list[Interval]], window: Interval) -> float:
    trainers = [spans for member, spans in up.items() if role_of(member) == TRAINER]
    rollouts = [spans for member, spans in up.items() if role_of(member) == ROLLOUT]
    edges = sorted({*window, *(edge for spans in up.values() for span in spans for edge in span)})
    credit = 0.0
    for left, right in pairwise(edges):
        training = all(_covers(spans, left) for spans in trainers)
        generating = sum(_covers(spans, left) for spans in rollouts)
        if training and (generating or not rollouts):
            share = 1.0
        elif training:
            share = len(trainers) / len(up)
        else:
            share = generating / len(up)
        credit += share * (right - left)
    return credit


class _Execution(msgspec.Struct):
    """One try at a step by one trainer incarnation, within its up time."""

    work_s: float = 0.0
    wait_s: float = 0.0
    done: bool = False
    died: bool = False


def _lost_steps_s(events: Sequence[Event], lives: Sequence[Life], up: dict[str, list[Interval]]) -> float:
    done: dict[tuple[int, int], float] = {(e.incarnation, e.step): e.t for e in of_kind(events, StepDone)}
    by_step: dict[tuple[str, int], list[_Execution]] = {}
    for life in (life for life in lives if life.role == TRAINER):
        tries: dict[int, _Execution] = {}
        spans = [span for span in life.spans if span.step >= 0] or _spans_between_steps(life, done)
        for span in spans:
            seconds = _total(cut for whole in up[life.member] if (cut := _cut((span.start, span.end), whole)))
            attempt = tries.setdefault(span.step, _Execution(done=(life.incarnation, span.step) in done))
            attempt.died = life.ended is not None
            if span.phase == Phase.WAIT:
                attempt.wait_s += seconds
            else:
                attempt.work_s += seconds
        for step, attempt in tries.items():
            by_step.setdefault((life.member, step), []).append(attempt)
    lost_s = 0.0
    for attempts in by_step.values():
        for i, attempt in enumerate(attempts):
            later = attempts[i + 1 :]
            if (attempt.died and not attempt.done) or any(other.done for other in later):
                again_s = later[0].wait_s if later else 0.0
                lost_s += attempt.work_s + min(attempt.wait_s, again_s)
    return lost_s


def _spans_between_steps(life: Life, done: dict[tuple[int, int], float]) -> list[PhaseSpan]:
    """For a trainer that declares no phases: each step lasts from the step before to its own end."""
    ends = sorted((t, step) for (incarnation, step), t in done.items() if incarnation == life.incarnation)
    start = life.serving if life.serving is not None else life.began
    spans: list[PhaseSpan] = []
    for t, step in ends:
        spans.append(PhaseSpan(start, t, Phase.TRAIN, step))
        start = t
    if life.ended is not None and ends:
        spans.append(PhaseSpan(start, life.ended, Phase.TRAIN, ends[-1][1] + 1))
    return spans


def _lost_tokens_s(events: Sequence[Event], lives: Sequence[Life], end: float) -> float:
    made = _tokens_made(events)
    seconds = 0.0
    for life in lives:
        if life.identity in made and life.serving is not None:
            generating = [span.end - span.start for span in life.spans if span.phase == Phase.GENERATE]
            until = end if life.ended is None else life.ended
            seconds += sum(generating) or max(0.0, until - life.serving)
    tokens = sum(made.values())
    return regenerated_tokens(events) * seconds / tokens if tokens else 0.0


def _covers(spans: Iterable[Interval], t: float) -> bool:
    return any(start <= t < end for start, end in spans)


def _cut(span: Interval, window: Interval) -> Interval | None:
    start, end = max(span[0], window[0]), min(span[1], window[1])
    return (start, end) if end > start else None


def _total(spans: Iterable[Interval]) -> float:
    return sum(end - start for start, end in spans)


def _ratio(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
