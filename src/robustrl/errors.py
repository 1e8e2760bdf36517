"""What can go wrong, one class a kind. Each error says what failed, who and where, why, and what to do."""

from __future__ import annotations


class RobustError(Exception):
    """The base of all of robustrl's errors.

    Args:
        what: what failed, in one clause.
        who: the member or identity it happened to (``rollout/1#3``).
        phase: the phase that member was in.
        why: the cause, as far as it is known.
        do: what the reader can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        who: object | None = None,
        phase: str | None = None,
        why: str | None = None,
        do: str | None = None,
    ) -> None:
        self.what = what
        self.who = None if who is None else str(who)
        self.phase = phase
        self.why = why
        self.do = do
        super().__init__(what)

    def __str__(self) -> str:
        where = ""
        if self.who is not None:
            where = f"{self.who}: " if self.phase is None else f"{self.who} in phase {self.phase}: "
        elif self.phase is not None:
            where = f"in phase {self.phase}: "
        text = where + self.what
        if self.why:
            text += f": {self.why}"
        if self.do:
            text += f". {self.do}"
        return text


class ConfigError(RobustError):
    """The configuration, a command line or an argument is wrong; nothing was started."""


class AttachError(ConfigError):
    """A framework cannot be attached to as it is: it has moved, or is not the one that was expected."""


class MissingDependencyError(RobustError, ImportError):
    """A library of an extra is needed and is not installed."""


class WireError(RobustError):
    """Something on a connection between members."""


class ProtocolError(WireError):
    """The peer sent what this protocol does not allow; the connection is closed."""


class HandshakeRefusedError(WireError):
    """The peer has another secret, another protocol version, or an identity that is not welcome."""


class PeerGoneError(WireError):
    """The connection ended before the answer came."""


class RemoteError(WireError):
    """The peer received the call and answered with an error. `kind` is the remote error's class name."""

    def __init__(self, what: str, *, kind: str, who: object | None = None, why: str | None = None) -> None:
        super().__init__(what, who=who, why=why)
        self.kind = kind


class DeadlineError(RobustError, TimeoutError):
    """A wait reached its limit."""


class FencedError(RobustError):
    """An older incarnation tried to act after its replacement took over. It must end itself."""


class RoleDownError(RobustError):
    """A role that this member needs is not there, and its recovery did not come within the limit."""


class JobFailedError(RobustError):
    """The job was given up. `why` is the first cause, with the traceback of the member that it struck."""


class MemberFailedError(RobustError):
    """A background task of a member ended with an exception."""


class SpawnError(RobustError):
    """A member could not be started."""


class LedgerError(RobustError):
    """The trajectory ledger refused something or cannot store it."""


class StorageError(LedgerError):
    """The ledger's store cannot be written or read (a full disk). What was acknowledged stays; the rest is resent."""


class WriterFencedError(FencedError):
    """Another process opened the ledger's store for writing. This ledger server must end itself."""


class IllegalMoveError(RobustError):
    """A state machine was asked for a move that it does not allow."""


class SnapshotError(RobustError):
    """A durable point is missing, incomplete or corrupt."""


class WeightError(RobustError):
    """Weights could not be published, transferred or applied."""


class WeightMismatchError(WeightError):
    """The published tensors and the receiver's differ in name, shape or dtype; the tensor is named."""


class CorruptChunkError(WeightError):
    """A chunk's digest is not what the manifest says."""


class TransportError(WeightError):
    """A transport could not connect, send or receive; the peer and what was in flight are named."""
