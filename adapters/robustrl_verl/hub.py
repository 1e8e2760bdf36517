"""The hub: one small actor of ours beside verl's, which all others find by its name.

It hosts the weight directory, knows which replicas live, and keeps the first cause of a failure. It belongs to the
task runner: it survives trainers and replicas, and ends with the job, because without its task runner there is none.
All that it knows is soft: Ray starts it again when it dies, holders announce their versions again, and the rollouter
names its replicas again with the next weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

from robustrl import events
from robustrl.attach import Session
from robustrl.config import RobustConfig
from robustrl.errors import DeadlineError, RoleDownError
from robustrl.reconnect import Directory, DirectoryService
from robustrl.roles import MANAGER, ROLLOUT, Identity, Member
from robustrl.wire import Address, RpcServer, Secret, bind

log = logging.getLogger("robustrl.verl")

NAME: Final = "robustrl_hub"
ASK_S: Final = 30.0
"""Seconds to wait for an answer of the hub."""
LOOPBACK: Final = "127.0.0.1"


def session_config() -> RobustConfig:
    """The settings of this process's session; the defaults where the engine is used alone."""
    session = Session.current()
    return RobustConfig() if session is None else session.config


def emitter(by: Identity) -> events.Emit:
    """Says events in the run's log, or in the process's own where there is no run folder."""
    session = Session.current()
    if session is not None:
        return session.events(by).emit
    return lambda event: log.info("%s: %s", by, event)


def listen_host() -> str:
    """Where a member of this job listens: loopback while all of the job is on one machine."""
    import ray

    cluster: Any = ray
    alive = [node for node in cluster.nodes() if node["Alive"]]
    return LOOPBACK if len(alive) <= 1 else str(cluster.util.get_node_ip_address())


class Hub:
    """Runs as an actor. Its methods are called by the other processes of the job, through Ray.

    Args:
        secret: the job's secret; at a restart Ray gives it again, so that members are still welcome.
        host: where to listen.
    """

    def __init__(self, secret: bytes, host: str) -> None:
        from robustrl_verl.fleet import Fleet

        self._secret = secret
        self._host = host
        self.emit = emitter(Identity(Member(MANAGER), 1))
        self._server: RpcServer | None = None
        self._starting = asyncio.Lock()
        self._lives: dict[Member, int] = {}
        self._directory = DirectoryService(Directory(), self.emit)
        self._cause = ""
        self._failed = asyncio.Event()
        self.fleet = Fleet(session_config(), self.emit, self.fail)

    async def contact(self) -> tuple[str, str]:
        """(host and port of the directory, the job's secret in hexadecimal)."""
        async with self._starting:
            if self._server is None:
                server = RpcServer(self._directory.handle, Secret(self._secret), bind(self._host))
                await server.start()
                self._server = server
        return str(self._server.address), self._secret.hex()

    async def begin(self, role: str, index: int) -> int:
        """A new life of a member: its incarnation. Those before are fenced off."""
        member = Member(role, index)
        number = self._lives[member] = self._lives.get(member, 0) + 1
        self._directory.fence(member, number)
        return number

    async def resume(self, role: str, index: int, incarnation: int) -> None:
        """A member has had lives up to this one; the hub may have been started after it."""
        member = Member(role, index)
        self._lives[member] = max(self._lives.get(member, 0), incarnation)

    async def watch(self, replicas: list[dict[str, Any]], balancer: Any, rollouter: Any) -> None:
        """See `Fleet.watch`."""
        self.fleet.watch(replicas, balancer, rollouter)

    async def lost(self, address: str, cause: str) -> None:
        """Somebody found the replica at `address` dead or useless."""
        await self.fleet.condemn(address, cause, "report")

    async def dead(self) -> dict[str, str]:
        """The replicas that are out, by address, with why."""
        return self.fleet.dead()

    def fail(self, cause: str) -> None:
        if not self._cause:
            self._cause = cause
            self.emit(events.JobEnded(outcome="failed", cause=cause))
            self._failed.set()

    async def give_up(self, cause: str) -> str:
        """The job is given up. Returns the first cause, which may be an earlier one."""
        self.fail(cause)
        return self._cause

    async def failure(self, wait_s: float) -> str:
        """The first cause, once the job is given up; empty if it is not within `wait_s` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._failed.wait(), wait_s)
        return self._cause

    async def say(self, event: events.AnyEvent) -> None:
        """Writes an event of a process that has no log of its own."""
        self.emit(event)


def start_hub() -> Any:
    """The hub of this job, started if it is not there. It ends with the handle that whoever started it holds."""
    import ray

    session = Session.current()
    secret = secrets.token_bytes(32) if session is None else bytes.fromhex(session.secret_path.read_text().strip())
    remote: Any = ray.remote
    kind = remote(num_cpus=0, max_restarts=-1, max_concurrency=1000)(Hub)
    return kind.options(name=NAME, get_if_exists=True).remote(secret, listen_host())


def find_hub() -> Any:
    """The hub of this job. Raises RoleDownError when there is none."""
    import ray

    try:
        return ray.get_actor(NAME)
    except ValueError as error:
        raise RoleDownError("the hub is not there", why=str(error)) from error


def await_hub(seconds: float) -> Any:
    """The hub of this job, once somebody has started it. Raises RoleDownError when nobody does in time."""
    end = time.monotonic() + seconds
    while True:
        try:
            return find_hub()
        except RoleDownError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


async def ask(what: Any, seconds: float = ASK_S) -> Any:
    """Waits for the answer to a remote call, from a coroutine. Raises DeadlineError when it does not come."""

    async def wait() -> Any:
        return await what

    try:
        return await asyncio.wait_for(wait(), seconds)
    except TimeoutError:
        raise DeadlineError(f"no answer within {seconds:g} s") from None


def ask_now(what: Any, seconds: float = ASK_S) -> Any:
    """The same, from a thread without an event loop."""
    import ray

    try:
        return ray.get(what, timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        raise DeadlineError(f"no answer within {seconds:g} s") from None


async def call_hub(method: str, *args: Any, seconds: float = ASK_S) -> Any:
    """Calls the hub, over its restarts, from a coroutine. Raises DeadlineError, or what says that it is gone."""
    from ray.exceptions import RayActorError

    end = time.monotonic() + seconds
    while True:
        try:
            return await ask(getattr(find_hub(), method).remote(*args), seconds)
        except (RayActorError, RoleDownError):
            if time.monotonic() > end:
                raise
        await asyncio.sleep(0.2)


def call_hub_now(method: str, *args: Any, seconds: float = ASK_S) -> Any:
    """The same, from a thread without an event loop."""
    return asyncio.run(call_hub(method, *args, seconds=seconds))


def locate(hub: Callable[[], Any]) -> Callable[[], Any]:
    """Finds the directory's address anew at each connect: the hub may have been started again elsewhere."""

    async def where() -> Address:
        address, _ = await ask(hub().contact.remote())
        return Address.parse(address)

    return where


def rollout_member(replica: int, rank: int = 0, world: int = 1) -> Member:
    """One worker of a replica, as a member. Where a replica is one worker, ``rollout/N`` is replica N."""
    return Member(ROLLOUT, replica * world + rank)
