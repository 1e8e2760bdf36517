"""Hand-made logs: what the processes of a small job would have written."""

from __future__ import annotations

import random

import msgspec
from hypothesis import strategies as st

from robustrl.events import (
    BatchCommitted,
    BatchConsumed,
    Event,
    FaultInjected,
    JobEnded,
    JobStarted,
    MemberMoved,
    MemberReady,
    PhaseEntered,
    PlanMade,
    Progress,
    StepDone,
    TokensDropped,
    TokensKept,
    VerdictReached,
    VersionPublished,
)

MEMBERS = ("trainer/0", "rollout/0", "rollout/1", "rollout/2", "manager/0", "supervisor/0", "standby/0")


class Story:
    """A log in the making; `events` gives it in time order."""

    def __init__(self, policy: str = "role", members: tuple[str, ...] = MEMBERS, steps: int = 10) -> None:
        self._events: list[Event] = [
            JobStarted(t=0.0, policy=policy, transport="tcp", steps=steps, members=members, seed=7)
        ]

    @property
    def events(self) -> list[Event]:
        return sorted(self._events, key=lambda event: event.t)

    def add(self, event: Event) -> Story:
        self._events.append(event)
        return self

    def starts(
        self,
        identity: str,
        attached: float,
        reloaded: float | None = None,
        serving: float | None = None,
        *,
        pid: int = 0,
        began: float | None = None,
    ) -> Story:
        member, _, incarnation = identity.partition("#")
        at = {"attached": attached, "reloaded": reloaded, "serving": serving}
        self._events.append(
            MemberMoved(
                t=attached if began is None else began,
                member=member,
                incarnation=int(incarnation),
                before="absent",
                after="starting",
                pid=pid,
            )
        )
        for milestone, t in at.items():
            if t is not None:
                self._events.append(MemberReady(t=t, member=member, incarnation=int(incarnation), milestone=milestone))
        return self

    def everyone_serves(self, t: float, incarnation: int = 1, roles: tuple[str, ...] = ("trainer", "rollout")) -> Story:
        members = next(event.members for event in self._events if isinstance(event, JobStarted))
        for member in members:
            if member.partition("/")[0] in roles:
                self.starts(f"{member}#{incarnation}", t, t, t)
        return self

    def fault(self, identity: str, t: float, kind: str = "kill", step: int = 1) -> Story:
        member, _, incarnation = identity.partition("#")
        return self.add(FaultInjected(t=t, kind=kind, member=member, incarnation=int(incarnation), step=step))

    def verdict(self, identity: str, t: float, verdict: str = "dead") -> Story:
        member, _, incarnation = identity.partition("#")
        return self.add(
            VerdictReached(
                t=t,
                member=member,
                incarnation=int(incarnation),
                verdict=verdict,
                phase="train",
                signal="exit",
                evidence="killed by SIGKILL",
            )
        )

    def plan(self, identity: str, t: float, *actions: str) -> Story:
        member, _, incarnation = identity.partition("#")
        return self.add(PlanMade(t=t, member=member, incarnation=int(incarnation), actions=actions))

    def phase(self, identity: str, t: float, phase: str, step: int) -> Story:
        member, _, incarnation = identity.partition("#")
        return self.add(PhaseEntered(t=t, member=member, incarnation=int(incarnation), phase=phase, step=step))

    def step_done(self, step: int, t: float, incarnation: int = 1, reward: float = 0.0, digest: str = "") -> Story:
        return self.add(StepDone(t=t, step=step, incarnation=incarnation, metrics={"reward": reward}, digest=digest))

    def batch(self, step: int, t: float, ids: tuple[str, ...], *, committed: bool = True) -> Story:
        self.add(BatchConsumed(t=t, step=step, incarnation=1, trajectories=ids))
        return self.add(BatchCommitted(t=t, step=step, trajectories=len(ids))) if committed else self

    def tokens(self, identity: str, t: float, made: int, kept: int | None = None) -> Story:
        member, _, incarnation = identity.partition("#")
        self.add(Progress(t=t, member=member, incarnation=int(incarnation), tokens=made))
        return self if kept is None else self.add(TokensKept(t=t, owner=identity, tokens=kept))

    def dropped(self, t: float, tokens: int) -> Story:
        return self.add(TokensDropped(t=t, tokens=tokens, why="whole-job restart"))

    def ends(self, t: float, outcome: str = "finished") -> Story:
        return self.add(JobEnded(t=t, outcome=outcome))


def realistic_run(policy: str = "role", steps: int = 14, seed: int = 3) -> list[Event]:
    """A run as the demo makes it: five faults, all recovered, with phases, weight versions and rewards."""
    rng = random.Random(seed)
    story = Story(policy, steps=steps)
    pid = 1000
    for i, member in enumerate(MEMBERS):
        start = 0.3 + 0.1 * i
        serving = None if member.startswith("standby") else start + 2.0 + 0.1 * i
        story.starts(f"{member}#1", start + 1.5, start + 1.8, serving, pid=pid + i, began=start)
    spans = {"wait": 1.2, "train": 1.5, "checkpoint": 0.25, "sync": 0.3}
    down = {4: 1.2}
    t, incarnation = 3.5, 1
    story.phase("trainer/0#1", 0.8, "init", -1)
    step = 1
    while step <= steps:
        for phase, seconds in spans.items():
            story.phase(f"trainer/0#{incarnation}", t, phase, step)
            if step in down and phase == "train":
                t += 0.7
                back = down.pop(step)
                identity = f"trainer/0#{incarnation}"
                story.fault(identity, t, "kill", step).verdict(identity, t + 0.05)
                story.plan(identity, t + 0.06, "promote standby/0#1 to trainer/0", "spawn standby/0")
                incarnation += 1
                story.starts(f"trainer/0#{incarnation}", t + 0.15, t + 0.6, t + back, pid=1006, began=t + 0.07)
                story.starts("standby/0#2", t + 2.5, t + 2.9, pid=1020, began=t + 0.1)
                t += back
                story.phase(f"trainer/0#{incarnation}", t, "wait", step)
                t += 0.1
                story.phase(f"trainer/0#{incarnation}", t, "train", step)
            t += seconds * rng.uniform(0.85, 1.15)
            if phase == "train":
                reward = 0.3 + 0.45 * step / steps + rng.uniform(-0.04, 0.04)
                story.step_done(step, t, incarnation, reward, digest=f"{step:04x}")
            if phase == "sync":
                story.add(
                    VersionPublished(t=t, version=f"{incarnation}.{step}", digest="", bytes=4 << 20, seconds=0.05)
                )
        step += 1
    end = t + 0.4
    lives = {
        "rollout/0": [(2.6, 21.0, "stop", 3.4), (24.4, end, "", 0.0)],
        "rollout/1": [(2.9, 9.2, "kill", 1.1), (10.3, end, "", 0.0)],
        "rollout/2": [(3.0, end, "", 0.0)],
    }
    for member, parts in lives.items():
        for i, (start, until, kind, back) in enumerate(parts, start=1):
            identity, now = f"{member}#{i}", start
            while now < until:
                story.phase(identity, now, "generate", -1)
                now += rng.uniform(1.6, 2.6)
                if now < until:
                    story.phase(identity, now, "sync", -1)
                    now += rng.uniform(0.05, 0.12)
                    if now < until and rng.random() < 0.6:
                        story.phase(identity, now, "wait", -1)
                        now += rng.uniform(0.1, 0.5)
            if kind:
                story.fault(identity, until, kind, 3).verdict(identity, until + (3.0 if kind == "stop" else 0.03))
                decided = until + (3.01 if kind == "stop" else 0.04)
                story.plan(identity, decided, f"spawn {member}")
                story.starts(
                    f"{member}#{i + 1}",
                    until + back - 0.3,
                    until + back - 0.25,
                    until + back,
                    pid=2000 + i,
                    began=decided,
                )
    for member, at, back in (("manager/0", 30.0, 0.8), ("supervisor/0", 37.0, 1.3)):
        story.fault(f"{member}#1", at, "kill", 9).verdict(f"{member}#1", at + 0.02)
        story.plan(f"{member}#1", at + 0.03, f"spawn {member}")
        story.starts(f"{member}#2", at + back - 0.2, at + back - 0.1, at + back, pid=3000, began=at + 0.03)
    return story.ends(end).events


def shifted(events: list[Event], seconds: float) -> list[Event]:
    """The same log at another time of day."""
    return [msgspec.structs.replace(event, t=event.t + seconds) for event in events]


_SMALL = ("trainer/0", "rollout/0", "rollout/1")
member = st.sampled_from(_SMALL)
when = st.floats(0, 20, allow_nan=False)
life = st.integers(1, 3)
step = st.integers(1, 4)
any_event: st.SearchStrategy[Event] = st.one_of(
    st.builds(
        MemberReady,
        t=when,
        member=member,
        incarnation=life,
        milestone=st.sampled_from(["attached", "reloaded", "serving"]),
    ),
    st.builds(FaultInjected, t=when, kind=st.just("kill"), member=member, incarnation=life, step=step),
    st.builds(
        VerdictReached,
        t=when,
        member=member,
        incarnation=life,
        verdict=st.sampled_from(["dead", "suspect"]),
        phase=st.just(""),
        signal=st.just("exit"),
        evidence=st.just(""),
    ),
    st.builds(
        PlanMade,
        t=when,
        member=member,
        incarnation=life,
        actions=st.sampled_from([(), ("restart the whole job",)]),
    ),
    st.builds(
        PhaseEntered,
        t=when,
        member=member,
        incarnation=life,
        phase=st.sampled_from(["wait", "train", "generate"]),
        step=step,
    ),
    st.builds(StepDone, t=when, step=step, incarnation=life),
    st.builds(Progress, t=when, member=member, incarnation=life, tokens=st.integers(0, 1000)),
    st.builds(TokensKept, t=when, owner=st.just("rollout/0#1"), tokens=st.integers(0, 1000)),
)


def any_log(drawn: list[Event]) -> list[Event]:
    served = [MemberReady(t=0.0, member=name, incarnation=1, milestone="serving") for name in _SMALL]
    head = JobStarted(t=0.0, policy="role", transport="tcp", steps=4, members=_SMALL)
    return [head, *served, *sorted(drawn, key=lambda event: event.t)]
