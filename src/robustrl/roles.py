"""The vocabulary: roles, members, incarnations, phases, weight versions.

Everything here is a value: frozen, ordered where order means something, printable, and safe to put on a wire.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, Self

import msgspec

from robustrl.errors import ConfigError

Role = str
"""What a member does for the job. Frameworks may add their own; these are the ones that robustrl knows."""

TRAINER: Final = "trainer"
ROLLOUT: Final = "rollout"
MANAGER: Final = "manager"
HYBRID: Final = "hybrid"
STANDBY: Final = "standby"
SUPERVISOR: Final = "supervisor"

_ROLE = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_MEMBER = re.compile(r"(?P<role>[a-z][a-z0-9_-]{0,31})(?:/(?P<index>\d{1,6}))?")
_IDENTITY = re.compile(r"(?P<member>[^#]+)#(?P<incarnation>\d{1,9})")
_VERSION = re.compile(r"(?P<attempt>\d{1,9})\.(?P<step>\d{1,12})")


def check_role(role: str) -> Role:
    """Returns `role`, or raises ConfigError when it is not a usable role name."""
    if not _ROLE.fullmatch(role):
        raise ConfigError(
            f"{role!r} is not a role name",
            why="a role is lower-case letters, digits, '_' and '-', at most 32, and starts with a letter",
        )
    return role


class Phase(StrEnum):
    """What a member says it is doing. Each (role, phase) has limits of its own; custom phases are plain strings."""

    INIT = "init"
    GENERATE = "generate"
    TOOL = "tool"
    WAIT = "wait"
    SYNC = "sync"
    TRAIN = "train"
    CHECKPOINT = "checkpoint"
    EVALUATE = "evaluate"
    IDLE = "idle"


class Member(msgspec.Struct, frozen=True, order=True):
    """One restartable unit of a role: what is replaced when it fails. Printed as ``rollout/1``."""

    role: Role
    index: int = 0

    def __str__(self) -> str:
        return f"{self.role}/{self.index}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``rollout/1``; ``trainer`` alone means ``trainer/0``."""
        found = _MEMBER.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f"{text!r} is not a member", why="a member is written ROLE or ROLE/NUMBER")
        return cls(found["role"], int(found["index"] or 0))


class Identity(msgspec.Struct, frozen=True, order=True):
    """One life of a member: its incarnation only grows, and is the fencing token. Printed as ``rollout/1#3``."""

    member: Member
    incarnation: int

    def __str__(self) -> str:
        return f"{self.member}#{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> Self:
        found = _IDENTITY.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f"{text!r} is not an identity", why="an identity is written ROLE/NUMBER#INCARNATION")
        return cls(Member.parse(found["member"]), int(found["incarnation"]))


class Version(msgspec.Struct, frozen=True, order=True):
    """A weight version: (run attempt, step), strictly increasing over failovers. Printed as ``2.14``.

    The attempt is the trainer's incarnation. A trainer that came back and repeats a step publishes under a higher
    attempt, so nothing that a predecessor still says about the same step can be taken for it.
    """

    attempt: int
    step: int

    def __str__(self) -> str:
        return f"{self.attempt}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Self:
        found = _VERSION.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f"{text!r} is not a weight version", why="a version is written ATTEMPT.STEP")
        return cls(int(found["attempt"]), int(found["step"]))
