"""New weights for every replica, each by itself: one that dies or fails is taken out, and the others go on.

verl's own flow is one wait over all senders and receivers, which the first failure ends for all, and which nothing
ends when somebody hangs. Here the trainer publishes while the replicas still generate; then each replica pauses,
loads, and resumes by itself. Every wait has a limit; a replica that hangs is ended by the hub, which ends its waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from robustrl.errors import DeadlineError, JobFailedError, RobustError, RoleDownError
from robustrl_verl.fleet import first_line
from robustrl_verl.hub import ask, call_hub, session_config

log = logging.getLogger("robustrl.verl")

SYNC_S: Final = 600.0
"""Seconds for the publication, and again for one replica (``detect.limits['trainer.sync']``)."""
PING_S: Final = 10.0


async def update_weights(wrapped: Callable[..., Any], manager: Any, global_steps: int | None = None) -> Any:
    """Wraps CheckpointEngineManager.update_weights. Returns the sender's metrics.

    Raises:
        JobFailedError: no replica is left.
        DeadlineError, RayActorError: the trainer published no version.
    """
    if manager.backend != "robustrl":
        return await wrapped(manager, global_steps)
    limit = session_config().detect.limits.get("trainer.sync", SYNC_S)
    dead = await call_hub("dead")
    manager.remove_replicas([r for r in manager.replicas if r._server_address in dead])
    _check_some_left(manager, dead)
    sent = manager.actor_wg.update_weights(global_steps=global_steps, mode=manager.backend)
    metrics: dict[str, Any] = {}
    for result in await ask(asyncio.gather(*sent), limit):
        metrics.update(result if isinstance(result, dict) else {})

    replicas = list(manager.replicas)
    outcomes = await asyncio.gather(*(_renew(r, global_steps, limit) for r in replicas), return_exceptions=True)
    failed = [(r, o) for r, o in zip(replicas, outcomes, strict=True) if isinstance(o, BaseException)]
    if any(_is_about_weights(error) for _, error in failed):
        # Without the trainer nobody could have got them: that is no fault of the replicas, which go on as they are.
        await _check_trainer(manager.actor_wg)
    for replica, error in failed:
        cause = f"{_what_happened(error, global_steps)}: {first_line(error)}"
        dead[replica._server_address] = cause
        await call_hub("lost", replica._server_address, cause)
    manager.remove_replicas([replica for replica, _ in failed])
    _check_some_left(manager, dead)
    return metrics


async def _renew(replica: Any, global_steps: int | None, limit: float) -> None:
    """Pauses one replica, loads the version of `global_steps` into it, and lets it go on."""
    from verl.checkpoint_engine.base import _worker_cls
    from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

    await ask(replica.abort_all_requests(), limit)
    try:
        await ask(replica.release_kv_cache(), limit)
        workers = RayWorkerGroup(
            worker_handles=replica.workers, ray_cls_with_init=RayClassWithInitArgs(cls=_worker_cls)
        )
        await ask(asyncio.gather(*workers.update_weights(global_steps=global_steps)), limit)
    except Exception as error:
        if _is_about_weights(error):  # nothing was loaded: it still has what it had
            await _resume(replica, limit)
        raise
    await _resume(replica, limit)


async def _resume(replica: Any, limit: float) -> None:
    await ask(replica.resume_kv_cache(), limit)
    await ask(replica.resume_generation(), limit)


def _is_about_weights(error: BaseException) -> bool:
    """Whether the receiver says that no version came, as opposed to having died or failed over one."""
    return isinstance(getattr(error, "cause", None), RobustError)


def _what_happened(error: BaseException, global_steps: int | None) -> str:
    from ray.exceptions import RayActorError

    if isinstance(error, RayActorError) or isinstance(getattr(error, "cause", None), RayActorError):
        return f"was lost while it got the weights of step {global_steps}"
    return f"did not get the weights of step {global_steps}"


async def _check_trainer(group: Any) -> None:
    """Raises what says that a trainer worker is dead, if one is."""
    for worker in group.workers:
        try:
            await ask(worker.__ray_ready__.remote(), PING_S)
        except DeadlineError:
            raise RoleDownError(
                "a trainer worker has not answered", why=f"for {PING_S:g} s, after a publication"
            ) from None


def _check_some_left(manager: Any, dead: dict[str, str]) -> None:
    if not manager.replicas:
        first = next(iter(dead.values()), "they are gone")
        raise JobFailedError("no rollout replica is left", why=first)
