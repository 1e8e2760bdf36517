"""Typed events and the event log: the one record that reports, metrics, plots and tests read.

A log is a file of JSON lines. Every process of a job appends to the same file with single ``O_APPEND`` writes, so a
process that is killed loses nothing that it had said, and a torn last line (a full disk, a cut copy) costs that line.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    """Something that happened. `t` is wall time in seconds since the epoch; `by` is the identity that says so."""

    t: float = 0.0
    by: str = ""


# -- the job ----------------------------------------------------------------------------------------------------


class JobStarted(Event, frozen=True, kw_only=True, tag="job_started"):
    policy: str
    transport: str
    steps: int
    members: tuple[str, ...]
    """Members that the job is made of, standbys included, as ``role/index``."""
    seed: int = 0


class JobEnded(Event, frozen=True, kw_only=True, tag="job_ended"):
    outcome: str
    """``finished`` or ``failed``."""
    cause: str = ""


class Alarm(Event, frozen=True, kw_only=True, tag="alarm"):
    """Something a person should know although the job goes on."""

    text: str
    member: str = ""


# -- members ----------------------------------------------------------------------------------------------------


class MemberMoved(Event, frozen=True, kw_only=True, tag="member_moved"):
    """A member's state changed. `before` and `after` are states of `robustrl.restart.membership`."""

    member: str
    incarnation: int
    before: str
    after: str
    cause: str = ""
    pid: int = 0


class PhaseEntered(Event, frozen=True, kw_only=True, tag="phase_entered"):
    """The member is in `phase` from now on, until its next such event."""

    member: str
    incarnation: int
    phase: str
    step: int = -1
    """The step that the phase works for, where there is one."""


class MemberReady(Event, frozen=True, kw_only=True, tag="member_ready"):
    """A milestone of a start, said by the member: ``attached`` (joined the job), ``reloaded`` (state is back)
    or ``serving`` (does useful work again)."""

    member: str
    incarnation: int
    milestone: str
    detail: str = ""


class VerdictReached(Event, frozen=True, kw_only=True, tag="verdict"):
    member: str
    incarnation: int
    verdict: str
    phase: str
    signal: str
    """What showed it: exit, silence, no_progress, report."""
    evidence: str


class PlanMade(Event, frozen=True, kw_only=True, tag="plan"):
    member: str
    """The member whose verdict led to the plan."""
    incarnation: int
    actions: tuple[str, ...]
    why: str = ""


class FaultInjected(Event, frozen=True, kw_only=True, tag="fault"):
    kind: str
    member: str
    incarnation: int
    step: int
    pid: int = 0
    phase: str = ""


class Refused(Event, frozen=True, kw_only=True, tag="refused"):
    """An older incarnation, a late result or a foreign sample was turned away."""

    what: str
    identity: str
    why: str


class Progress(Event, frozen=True, kw_only=True, tag="progress"):
    """Tokens that an incarnation generated in all, as counted in memory that outlives it."""

    member: str
    incarnation: int
    tokens: int


# -- training -----------------------------------------------------------------------------------------------------


class StepDone(Event, frozen=True, kw_only=True, tag="step_done"):
    """The optimizer finished `step` (the first step is 1)."""

    step: int
    incarnation: int
    trajectories: tuple[str, ...] = ()
    metrics: dict[str, float] = {}
    digest: str = ""


# -- persist ------------------------------------------------------------------------------------------------------


class BatchConsumed(Event, frozen=True, kw_only=True, tag="batch_consumed"):
    """The ledger handed the batch of `step` to the optimizer; `replay` says that it had done so before."""

    step: int
    incarnation: int
    trajectories: tuple[str, ...]
    replay: bool = False


class BatchCommitted(Event, frozen=True, kw_only=True, tag="batch_committed"):
    """The durable point of `step` exists: its trajectories are done with."""

    step: int
    trajectories: int


class Leased(Event, frozen=True, kw_only=True, tag="leased"):
    """A trajectory group went to `owner`; `saved_tokens` had been kept by an earlier owner and are continued."""

    group: int
    owner: str
    saved_tokens: int = 0


class TokensKept(Event, frozen=True, kw_only=True, tag="tokens_kept"):
    """How many of the tokens that `owner` generated the ledger holds, said when the owner is fenced or done."""

    owner: str
    tokens: int


class GroupGivenUp(Event, frozen=True, kw_only=True, tag="group_given_up"):
    """Attempt after attempt at a group brought nothing: it has `finished` of `samples` answers, and the `rule` for such
    groups (`persist.partial_groups`) says what becomes of them."""

    group: int
    finished: int
    samples: int
    rule: str
    why: str


class TokensDropped(Event, frozen=True, kw_only=True, tag="tokens_dropped"):
    """Saved tokens that are thrown away and generated again (a restarted attempt, a whole-job restart)."""

    tokens: int
    why: str


class PointSaved(Event, frozen=True, kw_only=True, tag="point_saved"):
    step: int
    bytes: int
    blocking_s: float
    total_s: float


class Restored(Event, frozen=True, kw_only=True, tag="restored"):
    step: int
    source: str
    """``memory``, ``peer`` or ``disk``."""
    seconds: float


# -- reconnect ----------------------------------------------------------------------------------------------------


class VersionPublished(Event, frozen=True, kw_only=True, tag="version_published"):
    version: str
    digest: str
    bytes: int
    seconds: float


class VersionCommitted(Event, frozen=True, kw_only=True, tag="version_committed"):
    """A subscriber holds the whole version, verified."""

    version: str
    digest: str
    member: str
    incarnation: int
    sources: tuple[str, ...]
    transport: str
    bytes: int
    seconds: float
    staged: int = 0
    """Bytes of memory that it took while it was pulled; 0 where it was mapped."""


class TransportChosen(Event, frozen=True, kw_only=True, tag="transport_chosen"):
    peer: str
    transport: str
    why: str


AnyEvent = (
    JobStarted
    | JobEnded
    | Alarm
    | MemberMoved
    | PhaseEntered
    | MemberReady
    | VerdictReached
    | PlanMade
    | FaultInjected
    | Refused
    | Progress
    | StepDone
    | BatchConsumed
    | BatchCommitted
    | Leased
    | GroupGivenUp
    | TokensKept
    | TokensDropped
    | PointSaved
    | Restored
    | VersionPublished
    | VersionCommitted
    | TransportChosen
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)

Emit = Callable[[Any], None]
"""How a room says an event: anything that takes one. `EventLog.emit` is one, a list's `append` another."""


def ignore(event: Event) -> None:
    """The emitter of someone who keeps no log."""


class EventLog:
    """Appends events to a file, stamped with the time and the writer's identity.

    Args:
        path: the job's event file; created with its folder when missing.
        by: the identity that every event of this log carries.
    """

    listeners: ClassVar[list[Callable[[Event], None]]] = []
    """Called in the emitting thread with each event of this process, after it was written."""

    def __init__(self, path: Path | str, by: object) -> None:
        self.path = Path(path)
        self.by = str(by)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Writes one event. Never raises for a full disk: the job matters more than its record."""
        stamped = msgspec.structs.replace(event, t=event.t or time.time(), by=event.by or self.by)
        line = _encoder.encode(stamped) + b"\n"
        with self._lock:
            if self._fd >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._fd, line)
        for listener in self.listeners:
            listener(stamped)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class EventReader:
    """Reads a log as it grows: `poll` returns what was added since the last call, whole lines only."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._offset = 0
        self.torn = 0
        """Lines that could not be read (a torn write, an event of a newer robustrl)."""

    def poll(self) -> list[Event]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        events: list[Event] = []
        for line in data[:end].splitlines():
            try:
                events.append(_decoder.decode(line))
            except msgspec.MsgspecError:
                self.torn += 1
        return events


E = TypeVar("E", bound=Event)


def read_events(path: Path | str) -> list[Event]:
    """All events of a log, in the order of their times."""
    return sorted(EventReader(path).poll(), key=lambda event: event.t)


def of_kind(events: Iterable[Event], kind: type[E]) -> Iterator[E]:
    """The events of one class, in order."""
    return (event for event in events if isinstance(event, kind))
