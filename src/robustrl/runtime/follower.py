"""A member that keeps the newest weights at hand: rollouts to generate with them, standbys to be ready."""

from __future__ import annotations

import asyncio
import contextlib
import time

from robustrl.reconnect import HeldVersion, WeightSubscriber

PULL_WAIT_S = 5.0
AGAIN_S = 0.5


class WeightFollower:
    """Pulls each newer version in the background and holds the last few. Used on the member's loop.

    Args:
        subscriber: pulls and serves; started and closed here.
        keep: how many steps' weights are held.
    """

    def __init__(self, subscriber: WeightSubscriber, keep: int) -> None:
        self.subscriber = subscriber
        self.latest: HeldVersion | None = None
        """The newest version held."""
        self.newer = asyncio.Event()
        """Set when a version came; who waits clears it."""
        self._keep = keep
        self._by_step: dict[int, HeldVersion] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self, before: WeightFollower | None = None) -> asyncio.Task[None]:
        """Begins to serve and to follow.

        Args:
            before: the follower that this process had as another member; what it holds is taken over, and it is closed.

        Returns:
            The following task, for its exceptions to be watched.
        """
        await self.subscriber.start()
        if before is not None:
            for held in before._by_step.values():
                await self.subscriber.adopt(held)
                self.hold(held)
            await before.close()
        self._task = asyncio.create_task(self._follow())
        return self._task

    async def _follow(self) -> None:
        while True:
            known = self.latest.version if self.latest is not None else None
            begun = time.monotonic()
            held = await self.subscriber.pull(newer_than=known, timeout=PULL_WAIT_S)
            if held is not None:
                self.hold(held)
            elif time.monotonic() - begun < AGAIN_S:
                await asyncio.sleep(AGAIN_S)  # it failed at once; asking at once again would only add to the trouble

    async def exactly(self, step: int, timeout: float) -> HeldVersion | None:
        """The weights of one step, pulled if they are not held; None when nobody has them within `timeout` seconds."""
        held = self._by_step.get(step)
        if held is None:
            held = await self.subscriber.pull(step=step, timeout=timeout)
            if held is not None:
                self.hold(held)
        return held

    def steps(self) -> list[int]:
        """The steps whose weights are held."""
        return sorted(self._by_step)

    def hold(self, held: HeldVersion) -> None:
        known = self._by_step.get(held.version.step)
        if known is None or known.version < held.version:
            self._by_step[held.version.step] = held
        if self.latest is None or self.latest.version < held.version:
            self.latest = held
            # Steps above the newest version's are of a future that the trainer has gone back from.
            for step in [step for step in self._by_step if step > held.version.step]:
                del self._by_step[step]
        for step in self.steps()[: -self._keep]:
            del self._by_step[step]
        self.newer.set()

    async def pause(self) -> None:
        """Stops following, and keeps what it holds. (The supervisor takes a promoted standby out of the directory.)"""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def close(self) -> None:
        await self.pause()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.subscriber.close(), 5.0)


class _Warm:
    """What a promoted standby hands to the guard of its new role, in the same process."""

    follower: WeightFollower | None = None


def leave_warm(follower: WeightFollower) -> None:
    _Warm.follower = follower


def take_warm() -> WeightFollower | None:
    """What an earlier guard of this process left, once."""
    follower, _Warm.follower = _Warm.follower, None
    return follower
