"""Events in plain words, for the live view and its plain-line form."""

from __future__ import annotations

from robustrl.events import (
    Alarm,
    Event,
    FaultInjected,
    JobEnded,
    JobStarted,
    MemberReady,
    PlanMade,
    Refused,
    Restored,
    VerdictReached,
)
from robustrl.report.lives import failed, role_of
from robustrl.roles import STANDBY

SIGNALS = {"kill": "killed (SIGKILL)", "stop": "stopped (SIGSTOP)", "term": "told to end (SIGTERM)"}


def fault_words(event: FaultInjected) -> str:
    text = f"{event.member}#{event.incarnation} {SIGNALS.get(event.kind, event.kind)}"
    if event.step >= 0:
        text += f" at step {event.step}"
    return f"{text}, in {event.phase}" if event.phase else text


def in_words(event: Event) -> str:
    """One line about a notable event; empty for one that is everyday business or needs what was said before it."""
    match event:
        case JobStarted():
            made_of = f"{event.steps} steps, {len(event.members)} members"
            return f"job of {made_of}, over {event.transport}, policy {event.policy}"
        case JobEnded():
            return f"job {event.outcome}" + (f": {event.cause}" if event.cause else "")
        case Alarm():
            return f"alarm: {event.member + ': ' if event.member else ''}{event.text}"
        case FaultInjected():
            return fault_words(event)
        case VerdictReached() if failed(event):
            where = f" in {event.phase}" if event.phase else ""
            return f"{event.member}#{event.incarnation} is {event.verdict}{where}: {event.evidence or event.signal}"
        case PlanMade():
            return f"plan for {event.member}: {'; '.join(event.actions) or 'nothing to do'}"
        case Restored():
            return f"{event.by} resumed from step {event.step} ({event.source}), {event.seconds:.2f} s"
        case MemberReady() if event.milestone == "serving":
            does = "stands by" if role_of(event.member) == STANDBY else "serves"
            return f"{event.member}#{event.incarnation} {does}"
        case Refused():
            return f"{event.identity} refused: {event.what} ({event.why})"
        case _:
            return ""
