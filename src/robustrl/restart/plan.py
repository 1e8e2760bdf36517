"""The planner: a loss, the members and the history in; the smallest set of actions out. Pure.

The rules to give up on one role and restart the job are RobustRL's (arXiv 2512.22492): the same step fails twice, or
the restart of a role fails twice. A budget per window is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from robustrl.config import RestartConfig
from robustrl.restart.membership import MemberRecord, MemberState
from robustrl.roles import ROLLOUT, STANDBY, TRAINER, Identity, Member


class Loss(msgspec.Struct, frozen=True):
    """One incarnation that failed."""

    identity: Identity
    at: float
    """Seconds; any clock that goes on over restarts of the supervisor (wall time)."""
    step: int
    """The trainer's step at that time; -1 when unknown."""
    cause: str
    served: bool
    """Whether the incarnation had served: if not, its start failed."""
    recovered: bool = False
    """Whether a later incarnation of the member has served."""
    handled: bool = False
    """Whether what was planned about it was done; if not, the supervisor died over it."""


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Start a new incarnation of the member from nothing."""

    member: Member

    def __str__(self) -> str:
        return f"spawn {self.member}"


class Promote(msgspec.Struct, frozen=True, tag=True):
    """Let the standby's process go on as a new incarnation of the member."""

    standby: Identity
    member: Member

    def __str__(self) -> str:
        return f"promote {self.standby} to {self.member}"


class Abandon(msgspec.Struct, frozen=True, tag=True):
    """Go on without the member."""

    member: Member

    def __str__(self) -> str:
        return f"go on without {self.member}"


class RestartJob(msgspec.Struct, frozen=True, tag=True):
    """Start every member anew."""

    def __str__(self) -> str:
        return "restart the whole job"


class FailJob(msgspec.Struct, frozen=True, tag=True):
    """Give the job up."""

    cause: str

    def __str__(self) -> str:
        return "give up"


Action = Spawn | Promote | Abandon | RestartJob | FailJob


class Plan(msgspec.Struct, frozen=True):
    actions: tuple[Action, ...]
    why: str


def plan(
    loss: Loss,
    records: Sequence[MemberRecord],
    history: Sequence[Loss],
    job_restarts: Sequence[float],
    config: RestartConfig,
    *,
    serves: frozenset[str],
    now: float,
) -> Plan:
    """What to do about one loss.

    Args:
        loss: the incarnation that failed; its record is dead already.
        records: all members as they are now.
        history: earlier losses, oldest first.
        job_restarts: when the whole job was restarted before.
        config: the policy.
        serves: the roles that the job's standbys can take.
        now: on the clock of `Loss.at`.
    """
    member = loss.identity.member
    record = next((r for r in records if r.member == member), None)
    if record is None or record.incarnation != loss.identity.incarnation or record.living:
        return Plan((), f"{loss.identity} is not the current incarnation: nothing to do")
    if record.state is MemberState.FINISHED:
        return Plan((), f"{loss.identity} had finished")

    recent = [old for old in history if now - old.at <= config.window_s]
    same_role = [old for old in recent if old.identity.member.role == member.role]
    if member.role == STANDBY:
        if len(same_role) >= config.budget:
            return Plan(
                (Abandon(member),), f"{len(same_role)} standbys lost in {config.window_s:g} s: no more are started"
            )
        return Plan((Spawn(member),), "refill the standby pool")

    first_cause = next((old.cause for old in history if not old.recovered), loss.cause)
    if config.policy == "whole-job":
        return _restart_job(job_restarts, config, now, first_cause, "policy whole-job: any failure restarts everything")

    if len(same_role) >= config.budget:
        why = f"role {member.role} failed {len(same_role) + 1} times in {config.window_s:g} s (budget {config.budget})"
        living = [r for r in records if r.member.role == member.role and r.living]
        if member.role == ROLLOUT and len(living) >= max(1, config.min_rollouts):
            return Plan((Abandon(member),), why)
        return Plan((FailJob(first_cause),), why)

    mine = [old for old in history if old.identity.member == member]
    if not loss.served and mine and not mine[-1].served:
        return _restart_job(job_restarts, config, now, first_cause, f"the restart of {member} failed twice")
    # A step that fails twice points at the step, not at the machine. Step 0 and below is before the first batch.
    if member.role == TRAINER and loss.step > 0 and any(old.step == loss.step for old in mine[-1:]):
        return _restart_job(job_restarts, config, now, first_cause, f"{member} failed twice in step {loss.step}")

    if member.role not in serves or config.standby != "dedicated":
        return Plan((Spawn(member),), "cold start: no standby is kept for this role")
    # One that is still warming up is ahead of a process that would start only now, if it has a process.
    ready = {MemberState.STANDBY: 0, MemberState.STARTING: 1}
    standbys = sorted(
        (r for r in records if r.member.role == STANDBY and r.state in ready and r.process is not None),
        key=lambda r: (ready[r.state], r.member),
    )
    if not standbys:
        return Plan((Spawn(member),), "cold start: no standby is left")
    chosen = standbys[0]
    how = "warm" if chosen.state is MemberState.STANDBY else "half-warm"
    return Plan((Promote(chosen.identity, member), Spawn(chosen.member)), f"a {how} standby takes the place")


def _restart_job(job_restarts: Sequence[float], config: RestartConfig, now: float, cause: str, why: str) -> Plan:
    recent = [at for at in job_restarts if now - at <= config.window_s]
    limit = config.budget if config.policy == "whole-job" else min(1, config.budget)
    if len(recent) >= limit:
        return Plan((FailJob(cause),), f"{why}; the job was restarted {len(recent)} times in {config.window_s:g} s")
    return Plan((RestartJob(),), why)
