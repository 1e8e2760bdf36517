"""Faults from outside: real signals to a job's processes as soon as a step is in work.

Faults with a phase are not for this module: only the member itself knows its boundaries exactly, see
`robustrl.inject.member`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from robustrl.detect.process import ProcessId
from robustrl.events import Emit, Event, FaultInjected, MemberReady, StepDone
from robustrl.inject.schedule import Fault
from robustrl.roles import TRAINER


class Target(msgspec.Struct, frozen=True):
    """The process that is a member now."""

    incarnation: int
    pid: int
    started: int = 0
    """Its start in clock ticks, as in ``/proc/PID/stat``: guards against a pid that was handed on. 0: not known."""


class _Armed(msgspec.Struct):
    fault: Fault
    due: float | None = None
    """When it strikes, on the injector's clock; None until its step is in work."""


class Injector:
    """Strikes members from outside, each fault once. Call `poll` every few milliseconds with the log's new events.

    Args:
        faults: a schedule; those with a phase are left to the members.
        members: the processes of the job now, by member (``rollout/1``). A member that is not there is waited for.
        emit: writes FaultInjected, before the signal.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        faults: Iterable[Fault],
        members: Callable[[], Mapping[str, Target]],
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._armed = [_Armed(fault) for fault in sorted(faults) if not fault.moment]
        self._members = members
        self._emit = emit
        self._clock = clock
        self._step = 0

    @property
    def pending(self) -> tuple[Fault, ...]:
        """Faults that have not struck yet."""
        return tuple(armed.fault for armed in self._armed)

    def poll(self, events: Iterable[Event]) -> list[Fault]:
        """Takes in new events and strikes what is due. Returns the faults that struck now."""
        for event in events:
            match event:
                case MemberReady(milestone="serving") if event.member.startswith(f"{TRAINER}/"):
                    self._step = max(self._step, 1)
                case StepDone():
                    self._step = max(self._step, event.step + 1)
                case _:
                    pass
        now = self._clock()
        for armed in self._armed:
            if armed.due is None and armed.fault.step <= self._step:
                armed.due = now + armed.fault.delay_s
        due = [armed for armed in self._armed if armed.due is not None and armed.due <= now]
        if not due:
            return []
        members = self._members()
        struck = [armed for armed in due if self._strike(armed.fault, members.get(str(armed.fault.member)))]
        self._armed = [armed for armed in self._armed if armed not in struck]
        return [armed.fault for armed in struck]

    def _strike(self, fault: Fault, target: Target | None) -> bool:
        if target is None:
            return False
        process = ProcessId(target.pid, target.started) if target.started else ProcessId.of(target.pid)
        if not process.alive():
            return False
        # The event comes first: whatever reads the log must not see the consequence before the cause.
        self._emit(
            FaultInjected(
                kind=fault.action,
                member=str(fault.member),
                incarnation=target.incarnation,
                step=fault.step,
                pid=target.pid,
            )
        )
        process.send(fault.signal)
        return True
