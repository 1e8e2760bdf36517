"""A member's line to its supervisor: who we are, heartbeats, the membership, and the word to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from robustrl import events
from robustrl.config import RobustConfig
from robustrl.detect import ProcessId
from robustrl.errors import FencedError, JobFailedError, RobustError
from robustrl.roles import Identity
from robustrl.wire import Address, RpcClient, Secret

FENCED_EXIT = 71
LEASE_EXIT = 72

Beat = Callable[[], dict[str, Any]]


class Link:
    """Used on the member's loop, but for the plain attributes, which any thread may read.

    Args:
        identity: who we are.
        address: the supervisor's; it does not change while the job lives.
        secret: the job's secret.
        beat: what the next heartbeat says (phase, step, moves, active).
        emit: takes events.
    """

    def __init__(self, identity: Identity, address: Address, secret: Secret, beat: Beat, emit: events.Emit) -> None:
        self.identity = identity
        self.config = RobustConfig()
        self.services: dict[str, Address] = {}
        """What we serve; told to the supervisor at each (re)connect."""
        self.members: dict[str, tuple[int, str]] = {}
        self.stopping = False
        self.failure: RobustError | None = None
        """Why the job was given up, if it was."""
        self._beat = beat
        self._emit = emit
        self._client = RpcClient(
            lambda: address, identity, secret, on_push=self._pushed, on_connect=self._connected, server="the supervisor"
        )
        self.call = self._client.call
        self._seen_at = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_connect: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """Run after each reconnect: a restarted supervisor knows nothing that is not in its journal."""
        self.on_membership: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self.on_stop: list[Callable[[], None]] = []
        self._stopped = asyncio.Event()

    async def start(self) -> None:
        """Joins the job. Returns once the supervisor has welcomed us."""
        await self._client.connect()
        await self._hello()
        self._spawn(self._beats())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    async def say(self, milestone: str, detail: str = "") -> None:
        """Says a milestone of our start, in the log and to the supervisor."""
        self._emit(
            events.MemberReady(
                member=str(self.identity.member),
                incarnation=self.identity.incarnation,
                milestone=milestone,
                detail=detail,
            )
        )
        await self.call("member.ready", milestone=milestone)

    async def offer(self, service: str, address: Address) -> None:
        """Tells the job that we serve `service`."""
        self.services[service] = address
        await self._hello()

    async def locate(self, service: str) -> Address:
        """Where `service` is served now. Raises RoleDownError while nobody serves it."""
        return Address.parse(await self.call("member.locate", service=service, wait_s=5.0, timeout=20.0))

    async def stopped(self, timeout: float | None = None) -> bool:
        """Waits for the word to stop; False when `timeout` seconds pass before."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._stopped.wait()
        return self.stopping

    async def _hello(self) -> None:
        me = ProcessId.of(os.getpid())
        answer = await self.call(
            "member.hello",
            pid=me.pid,
            started=me.started,
            services={name: str(address) for name, address in self.services.items()},
        )
        self.config = RobustConfig.from_dict(answer["config"])
        self._update(answer["members"])
        if answer["stopping"]:
            self._stop(bool(answer["ok"]), str(answer["cause"]))

    def _connected(self) -> None:
        self._seen_at = time.monotonic()
        if self._tasks:  # a reconnect
            self._spawn(self._again())

    async def _again(self) -> None:
        await self._hello()
        for callback in self.on_connect:
            await callback()

    async def _beats(self) -> None:
        while True:
            try:
                if self._client.connected:
                    self._seen_at = time.monotonic()
                else:
                    await self._client.connect()
                await self._client.post("member.beat", **self._beat())
            except FencedError as error:
                self._end_self(FENCED_EXIT, str(error))
            except (RobustError, OSError) as error:
                away = time.monotonic() - self._seen_at
                if away > self.config.restart.member_lease_s:
                    self._end_self(LEASE_EXIT, f"no supervisor for {away:.1f} s: {error}")
            await asyncio.sleep(self.config.detect.heartbeat_s)

    def _end_self(self, code: int, why: str) -> None:
        """A member that must not act any more leaves without unwinding: nothing of it may still be written."""
        print(f"{self.identity} ends itself: {why}", file=sys.stderr, flush=True)
        os._exit(code)

    def _pushed(self, method: str, params: dict[str, Any]) -> None:
        if method == "stop":
            self._stop(bool(params["ok"]), str(params["cause"]))
        elif method == "membership":
            self._update(params["members"])

    def _update(self, members: dict[str, list[Any]]) -> None:
        self.members = {name: (int(incarnation), str(state)) for name, (incarnation, state) in members.items()}
        for callback in self.on_membership:
            self._spawn(callback())

    def _stop(self, ok: bool, cause: str) -> None:
        if self.stopping:
            return
        self.stopping = True
        if not ok:
            self.failure = JobFailedError(
                "the job was given up",
                who=self.identity,
                why=cause,
                do="The run folder's events.jsonl tells the story.",
            )
        self._stopped.set()
        for callback in self.on_stop:
            callback()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except FencedError as error:
                self._end_self(FENCED_EXIT, str(error))
            except (RobustError, OSError) as error:
                self._emit(events.Alarm(text=f"{error}", member=str(self.identity.member)))

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
