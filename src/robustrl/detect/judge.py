"""The judge: what is known of one member, to one verdict with evidence. Pure; time comes in as a number."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from robustrl.detect.limits import Limits
from robustrl.roles import ROLLOUT, Identity, Phase


class Verdict(StrEnum):
    HEALTHY = "healthy"
    SLOW = "slow"
    SUSPECT = "suspect"
    HUNG = "hung"
    DEAD = "dead"
    DEVICE_LOST = "device_lost"
    UNKNOWN = "unknown"

    @property
    def failed(self) -> bool:
        return self in (Verdict.HUNG, Verdict.DEAD, Verdict.DEVICE_LOST)


class Judgement(msgspec.Struct, frozen=True):
    verdict: Verdict
    signal: str
    """What showed it: ``exit``, ``report``, ``silence``, ``no_progress``, ``start`` or empty."""
    evidence: str
    """For a person: what was seen, for how long, against which limit."""


class MemberView(msgspec.Struct):
    """What the monitor knows of one incarnation. Times are the monitor's own monotonic seconds."""

    identity: Identity
    spawned_at: float
    heard_at: float | None = None
    """When its last word was read; None before its first."""
    phase: str = Phase.INIT
    phase_at: float = 0.0
    step: int = -1
    moves: int = 0
    moved_at: float = 0.0
    active: int = 0
    exited: str = ""
    """How its process ended, once it has."""
    failure: str = ""
    """What it said of its own failure (an exception with its traceback)."""


def judge(view: MemberView, limits: Limits, now: float) -> Judgement:
    """The verdict on one member at `now`.

    A member that said that it has finished is not judged any more. An end without that word is a failure whatever the
    exit code: code 0 does not mean that the work was done. Silence is judged before progress: a member that cannot
    speak cannot count either.
    """
    if view.failure:
        return Judgement(Verdict.DEAD, "report", view.failure)
    if view.exited:
        return Judgement(Verdict.DEAD, "exit", f"its process {view.exited} without having finished")
    if view.heard_at is None:
        waited = now - view.spawned_at
        if waited > limits.start_s:
            return Judgement(
                Verdict.HUNG, "start", f"not a word {waited:.1f} s after its start (limit {limits.start_s:g} s)"
            )
        return Judgement(Verdict.UNKNOWN, "", f"starting for {waited:.1f} s")
    silent = now - view.heard_at
    if silent > limits.silence_s:
        return Judgement(
            Verdict.HUNG,
            "silence",
            f"its process lives and said nothing for {silent:.1f} s (limit {limits.silence_s:g} s), "
            f"last phase {view.phase}",
        )
    limit = limits.progress_s(view.identity.member.role, view.phase)
    due = view.active > 0 if view.identity.member.role == ROLLOUT and view.phase == Phase.GENERATE else True
    if limit is not None and due:
        still = now - max(view.moved_at, view.phase_at)
        if still > limit:
            return Judgement(
                Verdict.HUNG,
                "no_progress",
                f"no progress in phase {view.phase} for {still:.1f} s (limit {limit:g} s), step {view.step}, "
                f"{view.active} active",
            )
        if still > limit / 2:
            return Judgement(Verdict.SLOW, "no_progress", f"{still:.1f} s without progress in phase {view.phase}")
    if silent > limits.silence_s / 2:
        return Judgement(Verdict.SUSPECT, "silence", f"silent for {silent:.1f} s")
    return Judgement(Verdict.HEALTHY, "", f"phase {view.phase}, heard {silent:.1f} s ago")
