"""The life of a trajectory: one pure state machine with one choke point.

    issued --lease--> leased --finish--> finished --consume--> consumed --commit--> committed
       ^                |  |                                       ^                    |
       |<---release-----+  +--fail--> failed --lease--> leased     +-------reopen-------+
       |                                |
       +--give up--> quarantined <------+
       +<---discard (anything that is not committed)

`advance` is the only function that changes a trajectory. It knows nothing of groups, stores or clocks.
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from robustrl.errors import IllegalMoveError
from robustrl.roles import Identity


class State(StrEnum):
    ISSUED = "issued"
    """Known and held by nobody; tokens of earlier attempts may be saved."""
    LEASED = "leased"
    FINISHED = "finished"
    """Its answer is whole and scored."""
    CONSUMED = "consumed"
    """Handed to the optimizer for one step, and for no other."""
    COMMITTED = "committed"
    """The durable point of its step exists."""
    FAILED = "failed"
    """The last attempt ended in an infrastructure failure; it waits for another attempt."""
    QUARANTINED = "quarantined"
    """Attempt after attempt brought nothing; nobody tries again, and it is never trained on."""


DONE = frozenset({State.FINISHED, State.CONSUMED, State.COMMITTED})
"""States in which the answer is whole: nobody generates for it any more."""

SETTLED = DONE | {State.QUARANTINED}
"""States in which nobody generates any more."""


class Trajectory(msgspec.Struct, frozen=True):
    id: str
    """``{prompt_index}/{sample_index}``."""
    state: State = State.ISSUED
    attempt: int = 0
    """The number of its newest lease; 0 before the first."""
    owner: Identity | None = None
    """Who holds it, or who finished it."""
    tokens: int = 0
    """Saved tokens, counted from the start of the answer."""
    reward: float | None = None
    finish_reason: str = ""
    step: int = 0
    """The optimizer step (from 1) that consumed it; 0 before."""
    failure: str = ""
    """The kind of the failure that ended the last attempt."""


def trajectory_id(group: int, sample: int) -> str:
    return f"{group}/{sample}"


def parse_id(text: str) -> tuple[int, int]:
    """(group, sample) of a trajectory id."""
    group, _, sample = text.partition("/")
    return int(group), int(sample)


# -- moves --------------------------------------------------------------------------------------------------------


class Lease(msgspec.Struct, frozen=True):
    owner: Identity
    attempt: int


class Append(msgspec.Struct, frozen=True):
    """`count` tokens that follow directly on the saved ones."""

    owner: Identity
    attempt: int
    start: int
    count: int


class Finish(msgspec.Struct, frozen=True):
    owner: Identity
    attempt: int
    tokens: int
    """The answer's whole length: an answer that lost its tail is never taken for a short one."""
    reward: float
    reason: str


class Release(msgspec.Struct, frozen=True):
    """The owner is gone (or its sibling failed): saved tokens stay, the lease ends."""


class Fail(msgspec.Struct, frozen=True):
    owner: Identity
    attempt: int
    kind: str
    keep_tokens: bool


class GiveUp(msgspec.Struct, frozen=True):
    kind: str


class Consume(msgspec.Struct, frozen=True):
    step: int


class Commit(msgspec.Struct, frozen=True):
    pass


class Reopen(msgspec.Struct, frozen=True):
    """The durable point that had committed it turned out unreadable: its step is going to be replayed."""


class Discard(msgspec.Struct, frozen=True):
    """Forget everything but its name and the number of its last attempt."""


Move = Lease | Append | Finish | Release | Fail | GiveUp | Consume | Commit | Reopen | Discard


def advance(now: Trajectory, move: Move) -> Trajectory:
    """The trajectory after `move`.

    A move that was made before and is repeated word for word (finish, consume, commit) returns `now` itself: the
    caller sees by identity that nothing changed.

    Raises:
        IllegalMoveError: the move is not allowed; says what was tried, on what.
    """
    replace = msgspec.structs.replace
    match move:
        case Lease(owner, attempt):
            if now.state in (State.ISSUED, State.FAILED) and attempt > now.attempt:
                return replace(now, state=State.LEASED, owner=owner, attempt=attempt, failure="")
        case Append(owner, attempt, start, count):
            if _held(now, owner, attempt) and start == now.tokens and count > 0:
                return replace(now, tokens=start + count)
        case Finish(owner, attempt, tokens, reward, reason):
            if now.state in DONE and (now.owner, now.attempt, now.tokens) == (owner, attempt, tokens):
                return now
            if _held(now, owner, attempt) and tokens == now.tokens and math.isfinite(reward):
                return replace(now, state=State.FINISHED, reward=reward, finish_reason=reason)
        case Release():
            if now.state is State.LEASED:
                return replace(now, state=State.ISSUED, owner=None)
        case Fail(owner, attempt, kind, keep_tokens):
            if _held(now, owner, attempt):
                tokens = now.tokens if keep_tokens else 0
                return replace(now, state=State.FAILED, owner=None, failure=kind, tokens=tokens)
        case GiveUp(kind):
            if now.state in (State.ISSUED, State.FAILED):
                return replace(now, state=State.QUARANTINED, owner=None, failure=now.failure or kind)
        case Consume(step):
            if now.state is State.CONSUMED and now.step == step:
                return now
            if now.state is State.FINISHED and step > 0:
                return replace(now, state=State.CONSUMED, step=step)
        case Commit():
            if now.state is State.COMMITTED:
                return now
            if now.state is State.CONSUMED:
                return replace(now, state=State.COMMITTED)
        case Reopen():
            if now.state is State.COMMITTED:
                return replace(now, state=State.CONSUMED)
        case Discard():
            if now.state is not State.COMMITTED:
                return Trajectory(now.id, attempt=now.attempt)
    raise IllegalMoveError(
        f"trajectory {now.id} cannot take {move}",
        who=now.owner,
        why=f"it is {now.state}, attempt {now.attempt}, {now.tokens} tokens saved"
        + (f", consumed by step {now.step}" if now.step else ""),
    )


def _held(now: Trajectory, owner: Identity, attempt: int) -> bool:
    return now.state is State.LEASED and now.owner == owner and now.attempt == attempt
