"""A warm standby: everything slow is done before it is needed."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from robustrl.errors import ConfigError
from robustrl.roles import ROLLOUT, STANDBY, TRAINER, Identity, Member, Phase
from robustrl.runtime.follower import WeightFollower, leave_warm
from robustrl.runtime.guard import Guard

T = TypeVar("T")

POLL_S = 5.0
_GUARDS = {TRAINER: "robustrl.runtime.trainer", ROLLOUT: "robustrl.runtime.rollout"}


class StandbyGuard(Guard):
    """Guards a process that waits for a place."""

    role = STANDBY

    def wait_for_place(self) -> Identity | None:
        """The member that this process is promoted to; None when the job ends without needing it."""
        with self.phase(Phase.IDLE):
            follower = self._loop.run(self._follow(), 60.0)
            self._loop.run(self.link.say("serving"), 30.0)
            place = self._loop.run(self._wait())
        if place is None:
            self._loop.run(follower.close(), 30.0)
            return None
        self._loop.run(follower.pause(), 30.0)
        leave_warm(follower)
        return place

    async def _follow(self) -> WeightFollower:
        follower = self.follower()
        # Not watched: without the newest weights a standby is less warm, no more than that.
        following = await follower.start()
        following.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return follower

    async def _wait(self) -> Identity | None:
        stopped = asyncio.create_task(self.link.stopped())
        try:
            while not stopped.done():
                asked = asyncio.create_task(self.link.call("standby.wait", wait_s=POLL_S, timeout=POLL_S + 60.0))
                await asyncio.wait({asked, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if asked.done() and (place := asked.result()) is not None:
                    return Identity(Member.parse(place["member"]), int(place["incarnation"]))
                asked.cancel()
            return None
        finally:
            stopped.cancel()


def standby(prepare: Callable[[], T], roles: Mapping[str, Callable[[T], None]]) -> None:
    """Runs this process as a warm standby, and as what it is promoted to.

    Args:
        prepare: does what is slow (imports, device, model) and returns it.
        roles: by role, what runs a member of it with what was prepared.
    """
    prepared: T
    guard = StandbyGuard()
    place: Identity | None = None
    with guard:
        for role in roles:  # what a guard of the role imports is slow as well
            if role in _GUARDS:
                importlib.import_module(_GUARDS[role])
        prepared = prepare()
        place = guard.wait_for_place()
        if place is not None:
            # The promoted process says its farewell as what it has become.
            guard.hand_over()
    if place is None:
        return
    if place.member.role not in roles:
        raise ConfigError(
            f"promoted to {place}, which this standby cannot be",
            why=f"it can be {', '.join(sorted(roles)) or 'nothing'}",
        )
    guard.place.become(place)
    roles[place.member.role](prepared)
