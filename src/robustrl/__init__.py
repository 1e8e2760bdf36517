"""robustrl: role-isolated fault tolerance for RL post-training jobs.

    with robustrl.guard(role="trainer", state={"model": model, "optim": optim}) as me:
        me.publish(model.state_dict())
        for batch in me.batches():
            with me.phase("train"):
                metrics = train_step(model, optim, batch)
            me.step_done(metrics)
            me.publish(model.state_dict())

Importing it needs neither torch nor a framework; what a role needs is imported when the role is guarded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from robustrl.config import RobustConfig
from robustrl.errors import ConfigError, RobustError
from robustrl.roles import MANAGER, ROLLOUT, TRAINER, Identity, Member, Phase, Version

if TYPE_CHECKING:
    import torch

    from robustrl.runtime.guard import Guard
    from robustrl.runtime.manager import ManagerGuard
    from robustrl.runtime.rollout import RolloutGuard
    from robustrl.runtime.trainer import TrainerGuard

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Identity",
    "Member",
    "Phase",
    "RobustConfig",
    "RobustError",
    "Version",
    "guard",
    "guarded",
    "standby",
]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@overload
def guard(role: Literal["trainer"], *, state: Mapping[str, Any]) -> TrainerGuard: ...
@overload
def guard(role: Literal["rollout"], *, weights: Mapping[str, torch.Tensor] | None = None) -> RolloutGuard: ...
@overload
def guard(role: Literal["manager"]) -> ManagerGuard: ...
@overload
def guard(role: str) -> Guard: ...


def guard(
    role: str, *, state: Mapping[str, Any] | None = None, weights: Mapping[str, torch.Tensor] | None = None
) -> Guard:
    """Attaches this process to its job, as a context manager.

    Args:
        role: what the process is: ``trainer``, ``rollout``, ``manager``, or a role of the framework's own.
        state: trainer only: what a step changes, by name (modules, optimizers, schedulers). The newest durable point
            is restored into it on entry.
        weights: rollout only: the live tensors that newer versions are loaded into.

    Raises:
        ConfigError: the process was not started as a member of a job, or as one of another role.
    """
    if role == TRAINER:
        from robustrl.runtime.trainer import TrainerGuard

        if not state:
            raise ConfigError(
                "a trainer's guard needs its state", do="guard(role='trainer', state={'model': model, ...})"
            )
        return TrainerGuard(state)
    if role == ROLLOUT:
        from robustrl.runtime.rollout import RolloutGuard

        return RolloutGuard(weights)
    if role == MANAGER:
        from robustrl.runtime.manager import ManagerGuard

        return ManagerGuard()
    from robustrl.runtime.guard import Guard

    return Guard()


def guarded(role: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Runs a function of a role that has no state or weights of its own inside `guard(role)`."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with guard(role):
                return function(*args, **kwargs)

        return inside

    return wrap


def standby(prepare: Callable[[], T], roles: Mapping[str, Callable[[T], None]]) -> None:
    """Runs this process as a warm standby and, once promoted, as a member of another role.

    Args:
        prepare: does what is slow (imports, device, model) and returns it.
        roles: by role, what runs a member of it with what was prepared.
    """
    from robustrl.runtime.standby import standby as run

    run(prepare, roles)
