"""The monitor keeps the views, and suspects itself before it accuses anyone."""

from __future__ import annotations

from robustrl.detect.judge import Judgement, MemberView, Verdict, judge
from robustrl.detect.limits import Limits
from robustrl.roles import Identity

MAX_FORGIVEN = 5
"""How often in a row the monitor's own lateness excuses silence. A monitor that is always late must still judge."""


class Monitor:
    """Holds one view a member and judges all of them at each tick.

    Args:
        limits: the limits per role and phase.
        tick_s: how often `tick` should be called. A tick that comes later than twice that means that this process was
            itself stopped or starved: words may lie unread, so silence is forgiven by as much, a bounded number of
            times in a row.
    """

    def __init__(self, limits: Limits, tick_s: float) -> None:
        self.limits = limits
        self.tick_s = tick_s
        self.views: dict[Identity, MemberView] = {}
        self._last_tick: float | None = None
        self._forgiven = 0

    def watch(self, identity: Identity, now: float, *, adopted: bool = False) -> MemberView:
        """Begins to watch. An adopted member lived before this monitor did: it gets the silence limit from now on,
        not the start limit."""
        view = MemberView(identity, spawned_at=now, phase_at=now, moved_at=now, heard_at=now if adopted else None)
        self.views[identity] = view
        return view

    def forget(self, identity: Identity) -> None:
        self.views.pop(identity, None)

    def heard(self, identity: Identity, now: float) -> None:
        view = self.views.get(identity)
        if view is not None:
            view.heard_at = now

    def beat(self, identity: Identity, now: float, *, phase: str, step: int, moves: int, active: int) -> None:
        """A heartbeat arrived. It only carries: what counts is the phase and whether the counters moved."""
        view = self.views.get(identity)
        if view is None:
            return
        view.heard_at = now
        if phase != view.phase:
            view.phase, view.phase_at = phase, now
        if moves != view.moves or (active > 0 and view.active == 0):
            view.moves, view.moved_at = moves, now
        view.active = active
        view.step = step

    def tick(self, now: float) -> list[tuple[Identity, Judgement]]:
        """Judges everyone; returns the failed ones. Read everything that is queued before calling this."""
        late = 0.0 if self._last_tick is None else now - self._last_tick - 2 * self.tick_s
        self._last_tick = now
        if late > 0 and self._forgiven < MAX_FORGIVEN:
            self._forgiven += 1
            for view in self.views.values():
                if view.heard_at is not None:
                    view.heard_at = min(now, view.heard_at + late + 2 * self.tick_s)
                view.moved_at = min(now, view.moved_at + late)
                view.phase_at = min(now, view.phase_at + late)
                view.spawned_at = min(now, view.spawned_at + late)
        elif late <= 0:
            self._forgiven = 0
        found = [(identity, judge(view, self.limits, now)) for identity, view in self.views.items()]
        return [(identity, judgement) for identity, judgement in found if judgement.verdict.failed]

    def verdict(self, identity: Identity, now: float) -> Judgement:
        view = self.views.get(identity)
        if view is None:
            return Judgement(Verdict.UNKNOWN, "", "not watched")
        return judge(view, self.limits, now)
