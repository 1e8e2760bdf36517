"""Faults from inside: a member that ends itself at an exact boundary of its own work.

    python -m robustrl.inject.member SCRIPT [ARGS...]

runs SCRIPT as if it had been started directly, armed with the faults of the environment. Production code holds no hook
for this: the fault listens to the events that the process says anyway.

- ``before PHASE``: the moment that the member enters the phase, before it does anything there;
- ``in PHASE``: a few milliseconds (or the fault's delay) later, from another thread; when the phase is shorter than
  that, at its end;
- ``after PHASE``: the moment that the member enters whatever follows the phase.

For the trainer ``generate`` means its wait for the batch. A fault strikes once a job, also when the member comes back
and enters the same phase of the same step again.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from robustrl.errors import ConfigError
from robustrl.events import Emit, Event, EventLog, FaultInjected, PhaseEntered
from robustrl.inject.schedule import Fault, parse
from robustrl.roles import TRAINER, Phase

FAULTS = "ROBUSTRL_FAULTS"
RUN_DIR = "ROBUSTRL_RUN_DIR"

INSIDE_S = 0.003
"""How far into a phase ``in`` strikes when the fault names no delay."""


class Trap(msgspec.Struct):
    """One fault that waits for its moment. Pure: `heard` says what to do about an event."""

    fault: Fault
    inside: bool = False
    """The member is in the fault's phase and step right now."""

    def heard(self, event: PhaseEntered) -> str:
        """Returns ``now`` (strike before the member goes on), ``soon`` (from another thread) or ``""``."""
        if event.member != str(self.fault.member):
            return ""
        was_inside = self.inside
        self.inside = event.phase == phase_of(self.fault) and event.step == self.fault.step
        match self.fault.moment:
            case "before" if self.inside:
                return "now"
            case "in" if self.inside and not was_inside:
                return "soon"
            case "in" | "after" if was_inside and not self.inside:
                return "now"
            case _:
                return ""


def phase_of(fault: Fault) -> str:
    """The phase that the member itself declares for the phase that the fault names."""
    if fault.member.role == TRAINER and fault.phase == Phase.GENERATE:
        return Phase.WAIT.value
    return fault.phase


def arm(faults: Iterable[Fault], *, run_dir: Path | str, emit: Emit) -> Callable[[Event], None]:
    """Registers the faults that have a phase with this process's events. Returns the listener.

    Each event names the member that it is about, which decides whom a fault strikes: a standby does not know yet whose
    place it will take.

    Args:
        run_dir: the job's folder, where a marker file remembers each fault that struck.
        emit: writes FaultInjected before the signal.
    """
    traps = [Trap(fault) for fault in faults if fault.moment]

    def listen(event: Event) -> None:
        if not isinstance(event, PhaseEntered):
            return
        for trap in traps:
            how = trap.heard(event)
            if how == "soon":
                # Only the first of "soon" and the phase's end finds the marker free.
                threading.Thread(
                    target=_strike_later, args=(trap.fault, event, run_dir, emit), name="fault", daemon=True
                ).start()
            elif how == "now":
                if trap.fault.moment != "in" and trap.fault.delay_s:
                    time.sleep(trap.fault.delay_s)
                strike(trap.fault, event, run_dir, emit)

    EventLog.listeners.append(listen)
    return listen


def strike(fault: Fault, event: PhaseEntered, run_dir: Path | str, emit: Emit) -> bool:
    """Signals this very process, unless the fault has struck this job before. Returns whether it did."""
    marker = Path(run_dir) / "faults" / re.sub(r"[^a-z0-9.]+", "-", str(fault))
    marker.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    emit(
        FaultInjected(
            kind=fault.action,
            member=event.member,
            incarnation=event.incarnation,
            step=fault.step,
            pid=os.getpid(),
            phase=f"{fault.moment} {fault.phase}",
        )
    )
    os.kill(os.getpid(), fault.signal)
    return True


def _strike_later(fault: Fault, event: PhaseEntered, run_dir: Path | str, emit: Emit) -> None:
    time.sleep(fault.delay_s or INSIDE_S)
    strike(fault, event, run_dir, emit)


def arm_from_environment() -> bool:
    """Arms this process from ROBUSTRL_FAULTS (a schedule) and ROBUSTRL_RUN_DIR (the job's folder).

    Returns False when there is nothing to arm. Raises ConfigError for faults without a run folder.
    """
    faults = [fault for fault in parse(os.environ.get(FAULTS, "")) if fault.moment]
    if not faults:
        return False
    run_dir = os.environ.get(RUN_DIR, "")
    if not run_dir:
        raise ConfigError(f"{FAULTS} is set without {RUN_DIR}", do="Set it to the job's folder.")
    arm(faults, run_dir=run_dir, emit=EventLog(Path(run_dir) / "events.jsonl", by="inject").emit)
    return True


def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    if not words:
        raise SystemExit("usage: python -m robustrl.inject.member SCRIPT [ARGS...]")
    arm_from_environment()
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
