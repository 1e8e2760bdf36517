"""How far the bytes of a version have come that are still on their way to a relay."""

from __future__ import annotations

import asyncio

from robustrl.errors import TransportError


class ContentGoneError(TransportError):
    """The source is well and does not hold the content any more."""


class Arrival:
    """The verified bytes of a buffer, which come in its order, and those who wait for more. On one event loop."""

    def __init__(self) -> None:
        self.upto = 0
        """Bytes before this place are there."""
        self._gone = False
        self._moved = asyncio.Event()

    def advance(self, upto: int) -> None:
        self.upto = max(self.upto, upto)
        self._wake()

    def give_up(self) -> None:
        """No more will come."""
        self._gone = True
        self._wake()

    async def until(self, upto: int) -> None:
        """Waits for the bytes before `upto`. The caller sets the limit. Raises ContentGoneError when they do not
        come any more."""
        while self.upto < upto:
            if self._gone:
                raise ContentGoneError("the relay has given up the version that it was pulling itself")
            await self._moved.wait()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
