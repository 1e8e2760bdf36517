"""Which replicas live. Membership is ours: verl's own lists are edited to follow it, and never asked.

A replica is its server actors and its weight workers; it lives and dies as one. What can show that one is lost: a call
that Ray answers with the actor's death, a question that the engine does not answer in time, or the report of somebody
whose request or weights failed on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from robustrl import events
from robustrl.config import RobustConfig
from robustrl.errors import DeadlineError, RobustError
from robustrl.restart import Abandon, FailJob, Loss, MemberState, Plan, Roster, plan
from robustrl.roles import Member
from robustrl_verl.hub import ask, call_hub, rollout_member

log = logging.getLogger("robustrl.verl")

PERIOD_S: Final = 1.0
"""Seconds between two questions to one actor."""
LOOP_S: Final = 20.0
"""Seconds for an actor's event loop to answer (``detect.limits['rollout.ping']``)."""
ENGINE_S: Final = 60.0
"""Seconds for the engine behind it to answer (``detect.limits['rollout.engine']``)."""
PROBE: Final = "robustrl_probe"
"""A server's method that asks its engine; verl's vLLM server is given one."""
ADDRESS: Final = "get_server_address"
"""A method that verl's own servers have: their event loop answers."""


class Replica(msgspec.Struct):
    """One replica as the hub knows it."""

    member: Member
    address: str
    """verl's name of it in the load balancer."""
    servers: list[Any]
    workers: list[Any]
    task: asyncio.Task[None] | None = None
    cause: str = ""

    @property
    def lives(self) -> bool:
        return not self.cause


class Fleet:
    """The replicas of a job, watched from the hub.

    Args:
        config: `detect.limits` and `restart`.
        emit: takes verdicts, plans and moves.
        fail: called with the first cause when too few replicas are left.
    """

    def __init__(self, config: RobustConfig, emit: events.Emit, fail: Callable[[str], None]) -> None:
        self._config = config
        self._emit = emit
        self._fail = fail
        self._replicas: dict[str, Replica] = {}
        self._roster = Roster([], emit)
        self._history: list[Loss] = []
        self._balancer: Any = None
        self._rollouter: Any = None

    def watch(self, replicas: list[dict[str, Any]], balancer: Any, rollouter: Any) -> None:
        """Watches these replicas from now on; those that are known already are left as they are.

        Args:
            replicas: of each ``rank``, ``address``, and its actors, ``servers`` and ``workers``.
            balancer: verl's load balancer actor.
            rollouter: verl's rollouter actor.
        """
        self._balancer, self._rollouter = balancer, rollouter
        for said in replicas:
            if said["address"] in self._replicas:
                continue
            replica = Replica(rollout_member(said["rank"]), said["address"], said["servers"], said["workers"])
            self._replicas[replica.address] = replica
            for state in (MemberState.STARTING, MemberState.PENDING_WEIGHTS, MemberState.SERVING):
                self._roster.move(replica.member, state)
            replica.task = asyncio.get_running_loop().create_task(self._watch(replica))

    def dead(self) -> dict[str, str]:
        return {replica.address: replica.cause for replica in self._replicas.values() if not replica.lives}

    def living(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.lives]

    async def condemn(self, address: str, cause: str, signal: str) -> None:
        """Takes a replica out, once: from routing, from verl's lists, from the machine."""
        replica = self._replicas.get(address)
        if replica is None or not replica.lives:
            return
        record = self._roster[replica.member]
        cause = f"{record.identity} {cause}"
        replica.cause = cause
        self._emit(
            events.VerdictReached(
                member=str(replica.member),
                incarnation=record.incarnation,
                verdict="hung" if signal == "no_progress" else "dead",
                phase="generate",
                signal=signal,
                evidence=cause,
            )
        )
        log.warning("%s: it is taken out; %d replicas are left", cause, len(self.living()))
        # Routing first: least in flight is what a dead server looks like.
        await self._tell(self._balancer.remove_servers.remote([address]), "the load balancer")
        self._roster.move(replica.member, MemberState.DEAD, cause)
        self._decide(replica, cause)
        if self.living():
            await self._tell(self._rollouter.__ray_call__.remote(forget, address), "the rollouter")
        end_actors([*replica.servers, *replica.workers])

    def _decide(self, replica: Replica, cause: str) -> None:
        record = self._roster[replica.member]
        loss = Loss(record.identity, time.time(), -1, cause, served=record.served)
        decided = decide(loss, self._roster, self._history, self._config)
        # This adapter does not start replicas anew yet: whatever would be spawned is done without.
        enough = len(self.living()) >= max(1, self._config.restart.min_rollouts)
        over = not enough or any(isinstance(action, FailJob) for action in decided.actions)
        action = FailJob(self._history[0].cause) if over else Abandon(replica.member)
        self._emit(
            events.PlanMade(
                member=str(replica.member),
                incarnation=record.incarnation,
                actions=(str(action),),
                why=f"{len(self.living())} replicas are left, {self._config.restart.min_rollouts} are needed",
            )
        )
        if isinstance(action, FailJob):
            self._fail(f"no rollout replica is left; the first loss: {action.cause}" if not enough else action.cause)

    async def _tell(self, call: Any, who: str) -> None:
        try:
            await ask(call, LOOP_S)
        except Exception as error:  # whoever cannot be told now asks before the next weights
            log.warning("%s was not told: %s", who, error)

    async def _watch(self, replica: Replica) -> None:
        engine_s = self._config.detect.limits.get("rollout.engine", ENGINE_S)
        ping_s = self._config.detect.limits.get("rollout.ping", LOOP_S)
        while replica.lives:
            servers = (_ask_server(server, engine_s, ping_s) for server in replica.servers)
            workers = (_look(worker.__ray_ready__, ping_s, busy=True) for worker in replica.workers)
            for cause, signal in await asyncio.gather(*servers, *workers):
                if cause:
                    await self.condemn(replica.address, cause, signal)
                    return
            await asyncio.sleep(PERIOD_S)


async def _ask_server(server: Any, engine_s: float, ping_s: float) -> tuple[str, str]:
    """The best question that a server has an answer to: its engine's, its event loop's, its process's."""
    if hasattr(server, PROBE):
        return await _look(getattr(server, PROBE), engine_s)
    return await _look(getattr(server, ADDRESS if hasattr(server, ADDRESS) else "__ray_ready__"), ping_s)


async def _look(method: Any, limit_s: float, *, busy: bool = False) -> tuple[str, str]:
    """(why the actor is lost, what showed it), or empty. One that may be `busy` for long is lost only when dead."""
    from ray.exceptions import RayActorError, RayTaskError

    try:
        await ask(method.remote(), limit_s)
    except RayActorError as error:
        return f"was lost: {first_line(error)}", "exit"
    except DeadlineError:
        return ("", "") if busy else (f"has not answered for {limit_s:g} s", "no_progress")
    except RayTaskError as error:
        return f"is useless: {first_line(error.cause)}", "report"
    return "", ""


async def probe(server: Any) -> None:
    """Becomes a method of verl's vLLM server: a round trip through the engine, not only through its front.

    The engine's core is a process of its own, which can be dead or frozen behind an actor that lives. What it is asked
    goes through its queue of calls, which is served between two steps however many requests wait.
    """
    engine = getattr(server, "engine", None)
    if engine is not None:
        await engine.check_health()
        await engine.is_sleeping()


def decide(loss: Loss, roster: Roster, history: list[Loss], config: RobustConfig) -> Plan:
    """The plan for a loss, which is in `history` from then on. There are no standbys here."""
    decided = plan(loss, roster.all(), history, [], config.restart, serves=frozenset(), now=loss.at)
    history.append(loss)
    return decided


def first_line(error: BaseException) -> str:
    """The part of an error that says what happened; Ray's messages begin with where, and go on for long."""
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else type(error).__name__


def end_actors(actors: list[Any]) -> None:
    """Ends actors for good: what was condemned must not serve on half-alive."""
    import ray

    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor, no_restart=True)


def forget(rollouter: Any, address: str) -> None:
    """Runs inside the rollouter: verl's lists follow ours."""
    manager = rollouter.llm_server_manager
    for index, known in reversed(list(enumerate(manager.server_addresses))):
        if known == address:
            del manager.server_addresses[index]
            del manager.server_handles[index]
    manager.rollout_replicas[:] = [r for r in manager.rollout_replicas if r._server_address != address]
    if manager.rollout_replicas:
        rollouter._update_max_concurrent_samples()


async def watch_replicas(wrapped: Callable[..., Any], rollouter: Any) -> None:
    """Wraps FullyAsyncRollouter._init_async_rollout_manager: the replicas are there, and are watched."""
    await wrapped(rollouter)
    await tell_replicas(rollouter)


async def tell_replicas(rollouter: Any) -> None:
    """Names the rollouter's replicas to the hub."""
    import ray

    manager = rollouter.llm_server_manager
    me = ray.get_runtime_context().current_actor
    await call_hub("watch", list(_described(manager.rollout_replicas)), manager.global_load_balancer, me)


async def reset_staleness(wrapped: Callable[..., Any], rollouter: Any) -> Any:
    """Wraps FullyAsyncRollouter.reset_staleness, which comes with each version: a hub that was restarted is told."""
    timing = await wrapped(rollouter)
    try:
        await tell_replicas(rollouter)
    except (RobustError, OSError) as error:
        log.warning("the hub was not told of the replicas: %s", error)
    return timing


def _described(replicas: list[Any]) -> Iterator[dict[str, Any]]:
    for replica in replicas:
        yield {
            "rank": replica.replica_rank,
            "address": replica._server_address,
            "servers": list(replica.servers),
            "workers": list(replica.workers),
        }
