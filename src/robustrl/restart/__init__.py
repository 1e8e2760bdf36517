"""Restart: who is brought back, where, and when to give up.

`plan` decides without doing, `Roster` is the one place where a member's state changes, `Supervisor` does what the plans
say through a `Runtime`.
"""

from robustrl.restart.job import JobSpec, RoleSpec
from robustrl.restart.journal import Journal
from robustrl.restart.membership import MemberRecord, MemberState, Roster
from robustrl.restart.plan import Abandon, Action, FailJob, Loss, Plan, Promote, RestartJob, Spawn, plan
from robustrl.restart.supervisor import Runtime, Supervisor

__all__ = [
    "Abandon",
    "Action",
    "FailJob",
    "JobSpec",
    "Journal",
    "Loss",
    "MemberRecord",
    "MemberState",
    "Plan",
    "Promote",
    "RestartJob",
    "RoleSpec",
    "Roster",
    "Runtime",
    "Spawn",
    "Supervisor",
    "plan",
]
