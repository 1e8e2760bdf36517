"""The desk: what members say to the supervisor and ask of it, over the control wire."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from robustrl import events
from robustrl.config import RobustConfig
from robustrl.detect import Judgement, Monitor, ProcessId, Verdict
from robustrl.errors import FencedError, IllegalMoveError, ProtocolError, RobustError, RoleDownError
from robustrl.reconnect import DirectoryService
from robustrl.restart.journal import JobState
from robustrl.restart.membership import MemberRecord, MemberState, Roster
from robustrl.roles import STANDBY, TRAINER, Identity, Member
from robustrl.wire import Address, RpcServer, Secret

log = logging.getLogger("robustrl.supervisor")

LONGEST_WAIT_S = 30.0
"""A waiting call is answered after this at the latest; its caller asks again."""


class Owner(Protocol):
    """Whose desk it is: what follows from what members say is decided there."""

    config: RobustConfig
    state: JobState

    def met(self, identity: Identity, process: ProcessId) -> None:
        """The member introduced itself, perhaps not for the first time."""

    def served(self, member: Member) -> None:
        """The member does useful work."""

    def accuse(self, identity: Identity, judgement: Judgement) -> None:
        """The member said that it failed."""

    def stop(self, outcome: str, cause: str) -> None:
        """The job is over."""


class Desk:
    """Serves the control wire.

    Args:
        owner: decides.
        roster, monitor: what is known of the members; the desk notes what it hears.
        weights: answers the calls about weight versions.
        server_socket: the listening control socket.
        secret: the job's secret.
        emit: takes events.
    """

    def __init__(
        self,
        owner: Owner,
        *,
        roster: Roster,
        monitor: Monitor,
        weights: DirectoryService,
        server_socket: socket.socket,
        secret: Secret,
        emit: events.Emit,
    ) -> None:
        self._owner = owner
        self._roster = roster
        self._monitor = monitor
        self._weights = weights
        self._emit = emit
        self._server = RpcServer(self._handle, secret, server_socket, admit=self._admit, on_join=self._joined)
        self._services: dict[str, tuple[Identity, Address]] = {}
        self._changed = asyncio.Condition()

    @property
    def address(self) -> Address:
        return self._server.address

    async def open(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await self._server.close()

    # -- what the supervisor says ------------------------------------------------------------------------------------

    def tell_membership(self) -> None:
        self._server.notify("membership", members=self._membership())

    def tell_stop(self, state: JobState) -> None:
        self._server.notify("stop", ok=state.outcome == "finished", cause=state.cause)

    async def tell_places(self) -> None:
        """Wakes standbys that wait for a place, and whoever waits for a service."""
        async with self._changed:
            self._changed.notify_all()

    def forget(self, identity: Identity) -> None:
        """The incarnation is over: it serves nothing, and its connection is ended."""
        for name, (owner, _) in list(self._services.items()):
            if owner == identity:
                del self._services[name]
        self._server.drop(identity)

    # -- what members say --------------------------------------------------------------------------------------------

    def _admit(self, identity: Identity) -> RobustError | None:
        record = self._roster[identity.member]
        # A promoted standby may still have to hear of its new place.
        if self._roster.current(identity) or self._place_of(identity):
            return None
        if identity.incarnation <= record.incarnation:
            self._emit(
                events.Refused(
                    what="connect", identity=str(identity), why=f"current is {record.identity} {record.state}"
                )
            )
            return FencedError(
                "this incarnation was replaced",
                who=identity,
                why=f"{record.identity} is {record.state} in its place",
                do="It must end itself.",
            )
        return ProtocolError("an incarnation that nobody started", who=identity)

    def _joined(self, identity: Identity) -> None:
        self._monitor.heard(identity, time.monotonic())

    async def _handle(self, caller: Identity, method: str, params: dict[str, Any]) -> Any:
        if not self._roster.current(caller):
            if self._place_of(caller) is None:
                raise FencedError("this incarnation was replaced", who=caller, do="It must end itself.")
            # A promoted standby that has yet to hear of its place: under its old name it says nothing that counts any
            # more, and it is offered no weights.
            if method in ("member.beat", "member.ready") or method.startswith("weights."):
                return None
        self._monitor.heard(caller, time.monotonic())
        if method == "member.beat":
            self._monitor.beat(caller, time.monotonic(), **params)
            return None
        if method.startswith("weights."):
            return await self._weights.handle(caller, method, params)
        handlers: dict[str, Callable[..., Awaitable[Any]]] = {
            "member.hello": self._hello,
            "member.ready": self._milestone,
            "member.failed": self._failed,
            "member.finished": self._finished,
            "member.locate": self._locate,
            "standby.wait": self._standby_wait,
            "job.status": self._status,
            "job.give_up": self._give_up,
        }
        if method not in handlers:
            raise ProtocolError(f"the supervisor has no method {method!r}", who=caller)
        return await handlers[method](caller, **params)

    async def _hello(self, caller: Identity, *, pid: int, started: int, services: dict[str, str]) -> dict[str, Any]:
        self._owner.met(caller, ProcessId(pid, started))
        for name, address in services.items():
            self._services[name] = (caller, Address.parse(address))
        await self.tell_places()
        return {
            "config": msgspec.to_builtins(self._owner.config),
            "members": self._membership(),
            "stopping": bool(self._owner.state.outcome),
            "ok": self._owner.state.outcome != "failed",
            "cause": self._owner.state.cause,
        }

    async def _milestone(self, caller: Identity, *, milestone: str) -> None:
        record = self._roster[caller.member]
        target = {"attached": MemberState.PENDING_WEIGHTS, "serving": MemberState.SERVING}.get(milestone)
        if record.member.role == STANDBY:
            target = MemberState.STANDBY if milestone == "serving" else None
        if target is None or target is record.state:
            return
        with contextlib.suppress(IllegalMoveError):  # said again after a reconnect
            self._roster.move(caller.member, target, milestone)
            if milestone == "serving":
                self._owner.served(caller.member)
            self.tell_membership()

    async def _failed(self, caller: Identity, *, what: str) -> None:
        view = self._monitor.views.get(caller)
        if view is not None:
            view.failure = what
        self._owner.accuse(caller, Judgement(Verdict.DEAD, "report", what))

    async def _finished(self, caller: Identity) -> None:
        """Its work is done. How long the process takes to leave, and how it ends, is no failure any more."""
        self._roster.move(caller.member, MemberState.FINISHED, "its work is done")
        self._monitor.forget(caller)
        self.tell_membership()
        if all(r.state is MemberState.FINISHED for r in self._roster.all() if r.member.role == TRAINER):
            self._owner.stop("finished", "")

    async def _give_up(self, caller: Identity, *, cause: str) -> None:
        """A member found out that the job cannot go on, whoever is replaced."""
        log.info("%s gives the job up: %s", caller, cause)
        self._owner.stop("failed", cause)

    async def _locate(self, caller: Identity, *, service: str, wait_s: float) -> str:
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, LONGEST_WAIT_S)):
                    await self._changed.wait_for(lambda: service in self._services)
        if service not in self._services:
            raise RoleDownError(f"nobody serves {service!r} now", who=caller)
        return str(self._services[service][1])

    async def _standby_wait(self, caller: Identity, *, wait_s: float) -> dict[str, Any] | None:
        """The member that this standby is promoted to, when it is."""

        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, LONGEST_WAIT_S)):
                    await self._changed.wait_for(lambda: self._place_of(caller) is not None)
        found = self._place_of(caller)
        return {"member": str(found.member), "incarnation": found.incarnation} if found else None

    def _place_of(self, standby: Identity) -> MemberRecord | None:
        return next((r for r in self._roster.all() if r.origin == standby and r.living), None)

    async def _status(self, caller: Identity) -> list[dict[str, Any]]:
        rows = []
        for record in self._roster.all():
            view = self._monitor.views.get(record.identity)
            rows.append(
                {
                    "member": str(record.member),
                    "incarnation": record.incarnation,
                    "state": str(record.state),
                    "pid": record.process.pid if record.process else 0,
                    "phase": view.phase if view else "",
                    "step": view.step if view else -1,
                    "moves": view.moves if view else 0,
                }
            )
        return rows

    def _membership(self) -> dict[str, list[Any]]:
        return {str(r.member): [r.incarnation, str(r.state)] for r in self._roster.all()}
