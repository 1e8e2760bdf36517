"""Progress counters in a mapped file: the work bumps them for next to nothing, and they outlive a SIGKILL."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final, NamedTuple

_SIZE: Final = 64
_TOKENS, _MOVES, _ACTIVE, _STEP = 0, 1, 2, 3


class Counted(NamedTuple):
    """What a member had counted."""

    tokens: int = 0
    moves: int = 0
    active: int = 0
    step: int = -1
    """The step in work; -1 when it never said one."""


class ProgressCell:
    """One member's counters: tokens generated, moves of any kind (tokens, steps, chunks), work that is due, and the
    step in work.

    Adding costs well under a microsecond and never blocks: it is a store to memory that the kernel owns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w+b") as file:
            file.truncate(_SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._slots = memoryview(self._map).cast("Q")

    def tokens(self, count: int) -> None:
        """`count` more tokens were generated."""
        self._slots[_TOKENS] += count
        self._slots[_MOVES] += count

    def move(self, count: int = 1) -> None:
        """Something that is not a token moved on."""
        self._slots[_MOVES] += count

    @property
    def active(self) -> int:
        """Requests that are due: with none, silence means nothing."""
        return self._slots[_ACTIVE]

    @active.setter
    def active(self, count: int) -> None:
        self._slots[_ACTIVE] = count

    @property
    def step(self) -> int:
        """The step in work; -1 when there is none."""
        return self._slots[_STEP] - 1

    @step.setter
    def step(self, step: int) -> None:
        self._slots[_STEP] = step + 1

    def read(self) -> Counted:
        return Counted(self._slots[_TOKENS], self._slots[_MOVES], self._slots[_ACTIVE], self.step)

    def close(self) -> None:
        self._slots.release()
        self._map.close()

    @staticmethod
    def read_at(path: Path) -> Counted:
        """What a member that is gone had counted; nothing when it never counted."""
        try:
            data = path.read_bytes()
        except OSError:
            return Counted()
        if len(data) < _SIZE:
            return Counted()
        tokens, moves, active, step = struct.unpack_from("=4Q", data)
        return Counted(tokens, moves, active, step - 1)
