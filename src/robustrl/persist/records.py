"""What passes between the ledger and its clients: grants, batches, and the words of a lease's owner.

Token ids travel and are stored as packed little-endian int32, log-probabilities as packed little-endian float32.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from enum import Enum, StrEnum
from typing import Final

import msgspec

from robustrl.errors import LedgerError
from robustrl.persist.trajectory import trajectory_id

Prompt = bytes | list[int]
"""A prompt as the source gives it: opaque bytes, or token ids."""

ITEM: Final = 4
"""Bytes of one packed id or log-probability."""

RESTART: Final = "restart"
"""The kind of a failure after which the attempt cannot be continued elsewhere: its saved tokens are dropped."""


class End(Enum):
    """There is nothing more to wait for (as opposed to None: nothing yet)."""

    END = "end"


END: Final = End.END


class Outcome(StrEnum):
    """What became of a word of a lease's owner."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """It had been delivered before; nothing changed."""
    SUPERSEDED = "superseded"
    """The speaker does not hold the lease any more; nothing changed. It stops working on that group."""


def _packed(kind: str, values: Iterable[float] | Iterable[int]) -> bytes:
    try:
        items = array(kind, values)
    except (OverflowError, TypeError) as error:
        raise LedgerError("tokens cannot be packed", why=str(error)) from error
    if sys.byteorder != "little":
        items.byteswap()
    return items.tobytes()


def pack_ids(ids: Sequence[int]) -> bytes:
    return _packed("i", ids)


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    return _packed("f", logprobs)


def unpack_ids(data: bytes) -> list[int]:
    items = array("i", data)
    if sys.byteorder != "little":
        items.byteswap()
    return items.tolist()


def unpack_logprobs(data: bytes) -> list[float]:
    items = array("f", data)
    if sys.byteorder != "little":
        items.byteswap()
    return items.tolist()


class Segment(msgspec.Struct, frozen=True):
    """A run of tokens that one weight version made."""

    start: int
    """Offset of the first token in the answer."""
    ids: bytes
    logprobs: bytes
    version: str
    owner: str = ""
    trained: bool = True
    """False for what the answer contains and no weights made: the output of a tool."""
    sampling: str = ""
    """The sampling parameters that the tokens were drawn with, as the framework writes them down."""
    state: bytes = b""
    """What a tool or an agent needs to go on after the last of these tokens, opaque here."""

    def __len__(self) -> int:
        return len(self.ids) // ITEM

    def alike(self, other: Segment) -> bool:
        """Whether the two differ in their tokens alone."""
        mine, theirs = (self.version, self.owner, self.trained), (other.version, other.owner, other.trained)
        return mine == theirs and self.sampling == other.sampling


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a group, as far as it is saved. Segments follow on each other without gaps, from offset 0."""

    group: int
    sample: int
    segments: tuple[Segment, ...]
    finished: bool = False
    reward: float | None = None
    finish_reason: str = ""

    @property
    def id(self) -> str:
        return trajectory_id(self.group, self.sample)

    @property
    def tokens(self) -> int:
        return sum(len(segment) for segment in self.segments)

    def ids(self) -> list[int]:
        return unpack_ids(b"".join(segment.ids for segment in self.segments))

    def logprobs(self) -> list[float]:
        return unpack_logprobs(b"".join(segment.logprobs for segment in self.segments))

    def versions(self) -> list[str]:
        """The weight version that made each token."""
        return [segment.version for segment in self.segments for _ in range(len(segment))]

    def loss_mask(self) -> list[bool]:
        """For each token whether it is trained on."""
        return [segment.trained for segment in self.segments for _ in range(len(segment))]

    @property
    def state(self) -> bytes:
        """The state of a tool or agent after the newest token that came with one; empty before the first."""
        return next((segment.state for segment in reversed(self.segments) if segment.state), b"")


class Scored(Sample, frozen=True, kw_only=True):
    """A finished answer with its prompt, ready to train on."""

    prompt: Prompt


class LeaseGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The right to work on one group. `attempt` goes with each word about it."""

    group: int
    attempt: int
    prompt: Prompt
    samples: tuple[Sample, ...]
    """All n samples: those that are finished need no work, others go on after their saved tokens."""
    required_step: int | None = None
    """With exact staleness: the step whose weights make every token of this group. None: any that is held."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What optimizer step `step` (from 1) trains on: whole groups, in the order of prompts, then of samples."""

    step: int
    trajectories: tuple[Scored, ...]
    replay: bool = False
    """It had been handed out before, and is the very same."""
    partial: tuple[int, ...] = ()
    """Groups that are in it with fewer answers than they should have (`persist.partial_groups` = ``use``)."""
    omitted: tuple[int, ...] = ()
    """Groups that were given up, and are not in it."""


class Rewound(msgspec.Struct, frozen=True, kw_only=True):
    committed: int
    consumed: int
    """Steps committed+1 .. consumed are going to be replayed as they were."""


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    committed: int
    """Trajectories of committed steps."""
    steps: int
    """Committed steps that were looked at."""
    lost: tuple[str, ...]
    """Trajectories that belong to the steps asked for and that no committed step consumed, or whose data is gone."""
    duplicated: tuple[str, ...]
    """Trajectories that were consumed twice."""
    foreign: tuple[str, ...] = ()
    """Trajectories in a step whose batch they do not belong to."""
    omitted: tuple[str, ...] = ()
    """Trajectories of groups that were given up, in whole or in part: they were never trained on, by rule."""


# -- the words of an owner, as they travel -----------------------------------------------------------------------------


class AppendOp(msgspec.Struct, frozen=True, tag="append", tag_field="op", kw_only=True):
    group: int
    attempt: int
    sample: int
    start: int
    ids: bytes
    logprobs: bytes
    version: str
    trained: bool = True
    sampling: str = ""
    state: bytes = b""


class FinishOp(msgspec.Struct, frozen=True, tag="finish", tag_field="op", kw_only=True):
    group: int
    attempt: int
    sample: int
    tokens: int
    """The answer's whole length."""
    reward: float
    reason: str = ""


class FailOp(msgspec.Struct, frozen=True, tag="fail", tag_field="op", kw_only=True):
    group: int
    attempt: int
    sample: int | None
    kind: str
    detail: str = ""


Op = AppendOp | FinishOp | FailOp


class OpResult(msgspec.Struct, frozen=True, omit_defaults=True):
    outcome: Outcome | None
    """None: the word contradicts what is saved; `why` says how."""
    why: str = ""
