"""The state of each member, changed in one place: `Roster.move`."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

import msgspec

from robustrl import events
from robustrl.detect import ProcessId
from robustrl.errors import IllegalMoveError
from robustrl.roles import Identity, Member


class MemberState(StrEnum):
    ABSENT = "absent"
    STARTING = "starting"
    """Its process is on the way."""
    STANDBY = "standby"
    """Warm, and waiting to be promoted."""
    PENDING_WEIGHTS = "pending_weights"
    """Attached to the job, and not yet fit to serve: alive is not serving."""
    SERVING = "serving"
    PROMOTED = "promoted"
    """A standby whose process goes on as another member."""
    FINISHED = "finished"
    DEAD = "dead"


_S = MemberState
MOVES: Final[dict[MemberState, frozenset[MemberState]]] = {
    _S.ABSENT: frozenset({_S.STARTING}),
    _S.STARTING: frozenset({_S.PENDING_WEIGHTS, _S.STANDBY, _S.PROMOTED, _S.DEAD, _S.FINISHED}),
    _S.STANDBY: frozenset({_S.PROMOTED, _S.DEAD, _S.FINISHED}),
    _S.PENDING_WEIGHTS: frozenset({_S.SERVING, _S.DEAD, _S.FINISHED}),
    _S.SERVING: frozenset({_S.DEAD, _S.FINISHED}),
    _S.PROMOTED: frozenset({_S.STARTING}),
    _S.FINISHED: frozenset({_S.STARTING}),
    _S.DEAD: frozenset({_S.STARTING}),
}
LIVING: Final = frozenset({_S.STARTING, _S.STANDBY, _S.PENDING_WEIGHTS, _S.SERVING})


class MemberRecord(msgspec.Struct, frozen=True):
    member: Member
    incarnation: int = 0
    state: MemberState = MemberState.ABSENT
    process: ProcessId | None = None
    origin: Identity | None = None
    """The standby whose process this incarnation took over."""
    served: bool = False
    """Whether this incarnation ever served."""
    cause: str = ""

    @property
    def identity(self) -> Identity:
        return Identity(self.member, self.incarnation)

    @property
    def living(self) -> bool:
        return self.state in LIVING


class Roster:
    """All members of a job.

    Args:
        records: what is known at the start (empty, or what a predecessor kept).
        emit: takes one event for each move.
        keep: called with each changed record before the event is said, to make it durable.
    """

    def __init__(
        self, records: list[MemberRecord], emit: events.Emit, keep: Callable[[MemberRecord], None] = lambda record: None
    ) -> None:
        self._records = {record.member: record for record in records}
        self._emit = emit
        self._keep = keep

    def __getitem__(self, member: Member) -> MemberRecord:
        return self._records.get(member, MemberRecord(member))

    def all(self) -> list[MemberRecord]:
        return list(self._records.values())

    def living(self) -> list[MemberRecord]:
        return [record for record in self._records.values() if record.living]

    def current(self, identity: Identity) -> bool:
        """Whether this is the member's newest incarnation and it is not over."""
        record = self[identity.member]
        return record.incarnation == identity.incarnation and record.living

    def move(
        self, member: Member, state: MemberState, cause: str = "", *, origin: Identity | None = None
    ) -> MemberRecord:
        """The one way to change a member's state. A move to ``starting`` begins a new incarnation.

        Raises:
            IllegalMoveError: the state machine has no such move.
        """
        old = self[member]
        if state not in MOVES[old.state]:
            raise IllegalMoveError(
                f"a member cannot go from {old.state} to {state}", who=old.identity, why=cause or None
            )
        if state is MemberState.STARTING:
            new = MemberRecord(member, old.incarnation + 1, state, origin=origin, cause=cause)
        else:
            served = old.served or state is MemberState.SERVING
            new = msgspec.structs.replace(old, state=state, served=served, cause=cause)
        self._put(new)
        self._emit(
            events.MemberMoved(
                member=str(member),
                incarnation=new.incarnation,
                before=old.state,
                after=state,
                cause=cause,
                pid=new.process.pid if new.process else 0,
            )
        )
        return new

    def set_process(self, member: Member, process: ProcessId) -> MemberRecord:
        """Notes which process the current incarnation is."""
        new = msgspec.structs.replace(self[member], process=process)
        self._put(new)
        return new

    def _put(self, record: MemberRecord) -> None:
        self._keep(record)
        self._records[record.member] = record
