"""One asyncio loop in a background thread: a member's loop of its own, beside the user's synchronous code.

There is one for the life of the process, because UCX's Python futures are bound to the loop that first used them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from robustrl.errors import DeadlineError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for threads that are not async."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="robustrl", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Runs `work` on the loop and returns its result; raises DeadlineError after `timeout` seconds."""
        future = self.start(work)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if future.done():  # the work itself raised a TimeoutError
                raise
            future.cancel()
            raise DeadlineError(f"{getattr(work, '__qualname__', work)} did not end within {timeout:g} s") from error
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begins `work` and does not wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)


_shared: LoopThread | None = None
_lock = threading.Lock()


def shared_loop() -> LoopThread:
    """The process's loop, made at first use."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = LoopThread()
        return _shared
