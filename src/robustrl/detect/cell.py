"""Progress counters in a mapped file: the work bumps them for next to nothing, and they outlive a SIGKILL."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final

_SIZE: Final = 64
_TOKENS, _MOVES, _ACTIVE = 0, 1, 2


class ProgressCell:
    """One member's counters: tokens generated, moves of any kind (tokens, steps, chunks), and work that is due.

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

    def read(self) -> tuple[int, int, int]:
        """(tokens, moves, active) now."""
        return self._slots[_TOKENS], self._slots[_MOVES], self._slots[_ACTIVE]

    def close(self) -> None:
        self._slots.release()
        self._map.close()

    @staticmethod
    def tokens_at(path: Path) -> int:
        """What a member that is gone had counted; 0 when it never counted."""
        try:
            data = path.read_bytes()
        except OSError:
            return 0
        return int(struct.unpack_from("=Q", data, 8 * _TOKENS)[0]) if len(data) >= _SIZE else 0
