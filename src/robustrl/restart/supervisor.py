"""The supervisor: one per job. It hears the members, lets the planner decide, and does what the plan says.

Its memory is the journal. When it dies, its successor reads the journal, finds the living members by (pid, start time)
and goes on with them; they reconnect by themselves and notice nothing but a pause.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from robustrl import events
from robustrl.detect import Judgement, Limits, Monitor, ProcessId, ProgressCell, Verdict
from robustrl.errors import SpawnError
from robustrl.reconnect import Directory, DirectoryService
from robustrl.restart.desk import Desk
from robustrl.restart.job import JobSpec, RoleSpec
from robustrl.restart.journal import JobState, Journal
from robustrl.restart.membership import MemberRecord, MemberState, Roster
from robustrl.restart.plan import Abandon, Action, FailJob, Loss, Plan, Promote, RestartJob, Spawn, plan
from robustrl.roles import STANDBY, TRAINER, Identity, Member
from robustrl.wire import Secret

log = logging.getLogger("robustrl.supervisor")

END_SECONDS = 10.0
"""How long a killed process tree may take to be gone."""


class Runtime(Protocol):
    """Where members live."""

    async def spawn(self, identity: Identity, role: RoleSpec) -> ProcessId:
        """Starts a member and returns at once. Raises SpawnError."""

    def watch(self, process: ProcessId, on_exit: Callable[[str], None]) -> None:
        """Calls `on_exit` with words on how it ended, once, when the process ends (at once if it is gone)."""

    async def end(self, process: ProcessId, grace_s: float) -> None:
        """Asks the process tree to end, kills what is left after `grace_s`, and returns when all of it is gone."""


def cell_path(run_dir: Path, identity: Identity) -> Path:
    """Where an incarnation's progress counters lie."""
    return run_dir / "cells" / f"{identity.member.role}-{identity.member.index}-{identity.incarnation}"


class Supervisor:
    """Owns the membership of one job.

    Args:
        job: what the job is made of.
        run_dir: the job's folder.
        me: the supervisor's own identity.
        runtime: starts and ends members.
        journal: what an earlier supervisor of this job knew, and where this one keeps what it knows.
        server_socket: the listening control socket; it outlives the supervisor, so the address stays.
        secret: the job's secret.
        emit: takes events.
    """

    def __init__(
        self,
        *,
        job: JobSpec,
        run_dir: Path,
        me: Identity,
        runtime: Runtime,
        journal: Journal,
        server_socket: socket.socket,
        secret: Secret,
        emit: events.Emit,
    ) -> None:
        self.job = job
        self.config = job.config
        self.run_dir = run_dir
        self.me = me
        self._runtime = runtime
        self._journal = journal
        self._emit = emit
        self.state = journal.job()
        self._history = journal.losses()
        self.roster = Roster(journal.records(), emit, journal.put_record)
        self.monitor = Monitor(Limits(self.config.detect), self.config.detect.heartbeat_s)
        self._weights = DirectoryService(Directory(), emit)
        self.desk = Desk(
            self,
            roster=self.roster,
            monitor=self.monitor,
            weights=self._weights,
            server_socket=server_socket,
            secret=secret,
            emit=emit,
        )
        self._lost: asyncio.Queue[tuple[Identity, Judgement]] = asyncio.Queue()
        self._judged: set[Identity] = set()
        self._ending = asyncio.Event()
        self._adopting: set[Identity] = set()

    # -- life ------------------------------------------------------------------------------------------------------

    async def run(self) -> JobState:
        """Starts or takes over the job and returns when it is over and nothing of it is left."""
        await self.desk.open()
        tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._recover())]
        try:
            if self.state.outcome:
                self._ending.set()
            await self._take_over()
            await self._ending.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._end_members()
        await self.desk.close()
        self._emit(events.JobEnded(outcome=self.state.outcome, cause=self.state.cause))
        return self.state

    def stop(self, outcome: str, cause: str) -> None:
        """Ends the job. The first call decides how it ended."""
        if self.state.outcome:
            return
        self.state = msgspec.structs.replace(self.state, outcome=outcome, cause=cause)
        self._journal.put_job(self.state)
        self.desk.tell_stop(self.state)
        self._ending.set()

    async def _take_over(self) -> None:
        records = self.roster.all()
        if not records:
            for member in self.job.members():
                self.roster.move(member, MemberState.STARTING, "the job starts")
            self._ready("reloaded", "a new job")
            for member in self.job.members():
                await self._launch(member)
            self._ready("serving")
            return
        if self.config.restart.policy == "whole-job" and not self.state.outcome:
            self._ready("reloaded")
            await self._restart_job("the supervisor died")
            self._ready("serving")
            return
        now = time.monotonic()
        living = [record for record in records if record.living]
        for record in living:
            if record.process is None or not record.process.alive():
                gone = "while it was being started" if record.process is None else "while no supervisor watched"
                self.accuse(record.identity, Judgement(Verdict.DEAD, "exit", f"it ended {gone}"))
                continue
            self._adopting.add(record.identity)
            self.monitor.watch(record.identity, now, adopted=record.state is not MemberState.STARTING)
            self._watch_exit(record.identity, record.process)
        self._ready("reloaded", f"{len(self._adopting)} of {len(living)} living members found again")
        self._adoption_done()
        # A predecessor that died between a member's death and the end of its plan left work undone.
        for record in records:
            if record.state is MemberState.PROMOTED:
                self.roster.move(record.member, MemberState.STARTING, "refill the standby pool")
                await self._launch(record.member)
            elif record.state is MemberState.DEAD and not any(
                loss.identity == record.identity and loss.handled for loss in self._history
            ):
                self._judged.add(record.identity)
                self._lost.put_nowait(
                    (record.identity, Judgement(Verdict.DEAD, "exit", record.cause or "found dead by a new supervisor"))
                )

    def _ready(self, milestone: str, detail: str = "") -> None:
        self._emit(
            events.MemberReady(
                member=str(self.me.member), incarnation=self.me.incarnation, milestone=milestone, detail=detail
            )
        )

    def _adoption_done(self) -> None:
        if not self._adopting:
            self._ready("serving")

    async def _end_members(self) -> None:
        """Members end by themselves after the word to stop; what does not is killed."""
        deadline = time.monotonic() + self.config.restart.grace_s
        while time.monotonic() < deadline:
            # Who has finished may still have something to do of its own (a trainer that saves its model).
            if not any(r.process is not None and r.process.alive() for r in self.roster.all()):
                break
            await asyncio.sleep(0.05)
        for record in self.roster.all():
            if record.process is not None:
                try:
                    await asyncio.wait_for(self._runtime.end(record.process, 0.0), END_SECONDS)
                except TimeoutError:
                    text = f"process {record.process.pid} cannot be ended"
                    self._emit(events.Alarm(text=text, member=str(record.member)))
            if record.living:
                self.roster.move(record.member, MemberState.FINISHED, "the job is over")

    # -- detect ----------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.detect.heartbeat_s)
            for _ in range(3):  # let everything that has arrived be read before anyone is judged
                await asyncio.sleep(0)
            for identity, judgement in self.monitor.tick(time.monotonic()):
                self.accuse(identity, judgement)

    def _watch_exit(self, identity: Identity, process: ProcessId) -> None:
        def ended(how: str) -> None:
            view = self.monitor.views.get(identity)
            if view is None or self._ending.is_set():
                return
            view.exited = how
            self.accuse(identity, self.monitor.verdict(identity, time.monotonic()))

        self._runtime.watch(process, ended)

    def accuse(self, identity: Identity, judgement: Judgement) -> None:
        """Takes a failed verdict, once an incarnation."""
        if identity in self._judged or not self.roster.current(identity):
            return
        self._judged.add(identity)
        view = self.monitor.views.get(identity)
        self._emit(
            events.VerdictReached(
                member=str(identity.member),
                incarnation=identity.incarnation,
                verdict=judgement.verdict,
                phase=view.phase if view else "",
                signal=judgement.signal,
                evidence=judgement.evidence,
            )
        )
        self._lost.put_nowait((identity, judgement))

    # -- restart ---------------------------------------------------------------------------------------------------

    async def _recover(self) -> None:
        """One loss at a time: two plans at once could start two replacements."""
        while True:
            identity, judgement = await self._lost.get()
            if self._ending.is_set():
                return
            try:
                await self._recover_one(identity, judgement)
            except Exception as error:
                log.exception("recovering %s failed", identity)
                self.stop("failed", f"{identity}: recovery failed: {type(error).__name__}: {error}")

    async def _recover_one(self, identity: Identity, judgement: Judgement) -> None:
        record = self.roster[identity.member]
        if record.incarnation != identity.incarnation:
            return
        if record.living:
            record = self.roster.move(identity.member, MemberState.DEAD, judgement.evidence)
        cause = f"{identity} ({judgement.verdict}, {judgement.signal}): {judgement.evidence}"
        loss = Loss(identity, time.time(), self._step(), cause, record.served)
        history = [old for old in self._history if old.identity != identity]  # a predecessor began this and died
        todo = plan(
            loss,
            self.roster.all(),
            history,
            self.state.job_restarts,
            self.config.restart,
            serves=frozenset(role for spec in self.job.roles if spec.role == STANDBY for role in spec.serves),
            now=loss.at,
        )
        self._history = [*history, loss]
        self._journal.put_losses(self._history)
        self._emit(
            events.PlanMade(
                member=str(identity.member),
                incarnation=identity.incarnation,
                actions=tuple(str(action) for action in todo.actions),
                why=todo.why,
            )
        )
        # From here on whoever held something of the dead member's may hand it on.
        self._fence(Identity(identity.member, identity.incarnation + 1))
        await self._bury(record)
        self.desk.tell_membership()
        await self._do(todo)
        self._change_losses(lambda one: one.identity == identity, handled=True)

    def _change_losses(self, which: Callable[[Loss], bool], **changes: bool) -> None:
        self._history = [msgspec.structs.replace(loss, **changes) if which(loss) else loss for loss in self._history]
        self._journal.put_losses(self._history)

    async def _do(self, todo: Plan) -> None:
        for action in todo.actions:
            await self._act(action, todo.why)
        self.desk.tell_membership()

    async def _act(self, action: Action, why: str) -> None:
        if isinstance(action, Spawn):
            self.roster.move(action.member, MemberState.STARTING, why)
            await self._launch(action.member)
        elif isinstance(action, Promote):
            await self._promote(action.standby, action.member)
        elif isinstance(action, Abandon):
            self._emit(events.Alarm(text=f"the job goes on without {action.member}: {why}", member=str(action.member)))
        elif isinstance(action, RestartJob):
            await self._restart_job(why)
        elif isinstance(action, FailJob):
            self.stop("failed", action.cause)

    async def _launch(self, member: Member) -> None:
        record = self.roster[member]
        self.monitor.watch(record.identity, time.monotonic())
        try:
            process = await self._runtime.spawn(record.identity, self.job.role(member.role))
        except SpawnError as error:
            self.accuse(record.identity, Judgement(Verdict.DEAD, "exit", str(error)))
            return
        self.roster.set_process(member, process)
        self._watch_exit(record.identity, process)

    async def _promote(self, standby: Identity, member: Member) -> None:
        process = self.roster[standby.member].process
        self.roster.move(member, MemberState.STARTING, f"promotion of {standby}", origin=standby)
        self.roster.move(standby.member, MemberState.PROMOTED, f"becomes {member}")
        self.monitor.forget(standby)
        # Its process serves weights under the new name from now on. Its connection stays: it has yet to hear of that.
        self._weights.fence(standby.member, standby.incarnation + 1)
        record = self.roster[member]
        self.monitor.watch(record.identity, time.monotonic())
        if process is not None:
            self.roster.set_process(member, process)
            self._watch_exit(record.identity, process)
        await self.desk.tell_places()

    async def _restart_job(self, why: str) -> None:
        self.state = msgspec.structs.replace(self.state, job_restarts=(*self.state.job_restarts, time.time()))
        self._journal.put_job(self.state)
        for record in self.roster.living():
            self.monitor.forget(record.identity)
            self.roster.move(record.member, MemberState.DEAD, f"whole-job restart: {why}")
            self._fence(Identity(record.member, record.incarnation + 1))
        for record in self.roster.all():
            await self._bury(record)
        for member in self.job.members():
            self.roster.move(member, MemberState.STARTING, f"whole-job restart: {why}")
        for member in self.job.members():
            await self._launch(member)

    async def _bury(self, record: MemberRecord) -> None:
        """Makes sure that nothing of a dead incarnation runs on, then reads what it had counted."""
        self.monitor.forget(record.identity)
        if record.identity in self._adopting:
            self._adopting.discard(record.identity)
            self._adoption_done()
        if record.process is not None:
            await asyncio.wait_for(self._runtime.end(record.process, 0.0), END_SECONDS)
        path = cell_path(self.run_dir, record.identity)
        tokens = ProgressCell.read_at(path).tokens
        path.unlink(missing_ok=True)
        if tokens:
            self._emit(events.Progress(member=str(record.member), incarnation=record.incarnation, tokens=tokens))

    def _fence(self, successor: Identity) -> None:
        """Everything below the successor's incarnation is refused from now on."""
        self._weights.fence(successor.member, successor.incarnation)
        self.desk.forget(Identity(successor.member, successor.incarnation - 1))

    def _step(self) -> int:
        """The step that the trainer works or worked at. Its counters know it to the last moment; heartbeats, from
        another machine say, may be a step behind."""
        trainers = [record.identity for record in self.roster.all() if record.member.role == TRAINER]
        beats = [view.step for who, view in self.monitor.views.items() if who in trainers]
        return max([*beats, *(ProgressCell.read_at(cell_path(self.run_dir, who)).step for who in trainers)], default=-1)

    # -- what the desk heard -----------------------------------------------------------------------------------------

    def met(self, identity: Identity, process: ProcessId) -> None:
        if self.roster.current(identity) and self.roster[identity.member].process is None:
            self.roster.set_process(identity.member, process)
            self._watch_exit(identity, process)
        if identity in self._adopting:
            self._adopting.discard(identity)
            self._adoption_done()

    def served(self, member: Member) -> None:
        self._change_losses(lambda loss: loss.identity.member == member, recovered=True)
