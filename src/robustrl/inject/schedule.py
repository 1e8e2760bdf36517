"""Which faults strike whom and when: a small language, its checks, and schedules for demos and soak runs.

    kill rollout/1 at step 4; stop rollout/0 at step 8 +0.5s; kill trainer at step 10 in checkpoint

A fault is ``ACTION MEMBER at step N [in|before|after PHASE] [+SECONDSs]``. Actions are ``kill`` (SIGKILL), ``stop``
(SIGSTOP) and ``term`` (SIGTERM). ``trainer`` alone means ``trainer/0``. Without a phase the fault strikes as soon as
step N is in work; with one it strikes at that boundary of the member's own work for step N, or inside the phase. The
delay counts from there and may also be written ``after 0.5 s``.
"""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Literal, cast, get_args

import msgspec

from robustrl.errors import ConfigError
from robustrl.roles import MANAGER, ROLLOUT, SUPERVISOR, TRAINER, Member, Phase

Action = Literal["kill", "stop", "term"]
Moment = Literal["", "in", "before", "after"]

SIGNALS: Final[dict[Action, signal.Signals]] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
}

TRAINER_PHASES: Final = (Phase.WAIT.value, Phase.TRAIN.value, Phase.CHECKPOINT.value, Phase.SYNC.value)
"""The phases of a trainer's step, in order."""

_FAULT = re.compile(
    r"(?P<action>[a-z]+)\s+(?P<member>[^\s]+)\s+at\s+step\s+(?P<step>\d{1,9})"
    r"(?:\s+(?P<moment>in|before|after)\s+(?P<phase>[a-z][a-z0-9_-]*))?"
    r"(?:\s*(?:\+|\bafter\s)\s*(?P<delay>\d{1,6}(?:\.\d{1,9})?)\s*s)?"
)


class Fault(msgspec.Struct, frozen=True, order=True):
    """One fault. `str` gives the text that `parse` reads."""

    step: int
    """Steps count from 1."""
    member: Member
    action: Action = "kill"
    moment: Moment = ""
    phase: str = ""
    delay_s: float = 0.0
    """Seconds, to the millisecond."""

    def __str__(self) -> str:
        text = f"{self.action} {self.member} at step {self.step}"
        if self.moment:
            text += f" {self.moment} {self.phase}"
        if self.delay_s:
            text += f" +{self.delay_s:.3f}".rstrip("0").rstrip(".") + "s"
        return text

    @property
    def signal(self) -> signal.Signals:
        return SIGNALS[self.action]


def parse(text: str) -> tuple[Fault, ...]:
    """Reads faults separated by ``;`` or line ends. Raises ConfigError that names the one it cannot read."""
    pieces = [piece.strip() for piece in re.split(r"[;\n]", text)]
    return tuple(_parse_one(piece) for piece in pieces if piece)


def to_text(faults: Iterable[Fault]) -> str:
    """What `parse` reads back."""
    return "; ".join(str(fault) for fault in faults)


def _parse_one(text: str) -> Fault:
    found = _FAULT.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"cannot read the fault {text!r}",
            do="Write ACTION MEMBER at step N [in|before|after PHASE] [+SECONDSs], as in "
            "'kill trainer at step 10 in checkpoint'.",
        )
    if found["action"] not in get_args(Action):
        raise ConfigError(f"unknown action in the fault {text!r}", why=f"actions are {', '.join(get_args(Action))}")
    return Fault(
        step=int(found["step"]),
        member=Member.parse(found["member"]),
        action=cast(Action, found["action"]),
        moment=cast(Moment, found["moment"] or ""),
        phase=found["phase"] or "",
        delay_s=round(float(found["delay"] or 0), 3),
    )


def check(faults: Sequence[Fault], members: Collection[Member], steps: int) -> None:
    """Refuses a schedule that this job cannot run, with the fault named.

    Args:
        members: the members of the job, standbys included.
        steps: how many steps the job makes. A fault must strike before the last one, so that a recovery can be seen.
    """
    roles = {member.role for member in members}
    seen: set[Fault] = set()
    for fault in faults:
        if fault.member.role not in roles:
            raise ConfigError(
                f"unknown role {fault.member.role!r} in the fault '{fault}'",
                why=f"this job has {', '.join(sorted(roles))}",
            )
        if fault.member not in members:
            there = ", ".join(str(member) for member in sorted(members) if member.role == fault.member.role)
            raise ConfigError(f"there is no {fault.member} for the fault '{fault}'", why=f"this job has {there}")
        if not 1 <= fault.step < steps:
            raise ConfigError(
                f"the fault '{fault}' is outside the run",
                why=f"the job makes {steps} steps, and a fault strikes at step 1 to {steps - 1}",
            )
        if fault in seen:
            raise ConfigError(f"the fault '{fault}' is there twice")
        seen.add(fault)


def default_schedule(steps: int, rollouts: int) -> tuple[Fault, ...]:
    """Every role once: SIGKILL of a rollout, the trainer, the manager and the supervisor, SIGSTOP of a rollout.

    The faults are spread evenly over the run. Raises ConfigError when it is too short to hold them apart.
    """
    if steps < 6:
        raise ConfigError(
            f"{steps} steps are too few for the default faults", why="there are five", do="Make at least 6 steps."
        )
    victims: tuple[tuple[Action, Member], ...] = (
        ("kill", Member(ROLLOUT, min(1, rollouts - 1))),
        ("kill", Member(TRAINER)),
        ("stop", Member(ROLLOUT, 0)),
        ("kill", Member(MANAGER)),
        ("kill", Member(SUPERVISOR)),
    )
    return tuple(
        Fault(step=round(i * steps / 6), member=member, action=action)
        for i, (action, member) in enumerate(victims, start=1)
    )


def random_schedule(rng: random.Random, *, steps: int, rollouts: int, faults: int = 5) -> tuple[Fault, ...]:
    """Draws faults for a soak run: each in a step of its own from step 2 on, at least one a kill of the trainer in,
    before or after a phase of its step.

    Steps of their own, because a step that fails twice is rightly taken for a code error and ends the job.
    """
    if not 1 <= faults <= steps - 2:
        raise ConfigError(
            f"cannot draw {faults} faults in {steps} steps", why="each needs a step of its own, from 2 on"
        )
    drawn = sorted(rng.sample(range(2, steps), faults))
    surely_trainer = rng.choice(drawn)
    return tuple(_random_fault(rng, step, rollouts, trainer=step == surely_trainer) for step in drawn)


def _random_fault(rng: random.Random, step: int, rollouts: int, *, trainer: bool) -> Fault:
    if trainer or rng.random() < 0.4:
        moment = rng.choice(("in", "before", "after"))
        return Fault(step, Member(TRAINER), "kill", cast(Moment, moment), rng.choice(TRAINER_PHASES))
    role = rng.choice((ROLLOUT, ROLLOUT, MANAGER, SUPERVISOR))
    member = Member(role, rng.randrange(rollouts) if role == ROLLOUT else 0)
    action: Action = "stop" if role == ROLLOUT and rng.random() < 0.3 else "kill"
    return Fault(step, member, action, delay_s=rng.randrange(0, 500) / 1000)
