"""The launcher: the process a user starts. It starts the supervisor and brings it back when it dies; no more than that.

It holds what must outlive the supervisor: the listening control socket (so that the address never changes and nobody
else can take the port) and, as the subreaper, the members as their adoptive parent, so that none becomes a zombie.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from robustrl import events
from robustrl.detect import ProcessId
from robustrl.errors import ConfigError, SpawnError
from robustrl.restart import JobSpec, Journal, RestartJob
from robustrl.restart.journal import JobState
from robustrl.restart.supervisor import END_SECONDS
from robustrl.roles import SUPERVISOR, Identity, Member
from robustrl.runtime.local import LocalRuntime
from robustrl.runtime.supervise import GAVE_UP_EXIT
from robustrl.wire import Address, Secret, bind

_PR_SET_CHILD_SUBREAPER = 36
MAX_RESTARTS = 10
"""Supervisors that may die in one job. One more, and the job is ended."""


class Launcher:
    """Runs one job of this machine.

    Args:
        job: what the job is made of.
        run_dir: a new or empty folder for everything that the job writes.
        host, port: where the supervisor listens; port 0 takes a free one.

    Raises:
        ConfigError: the folder is in use or cannot be written, or the port is taken. Nothing was started.
    """

    def __init__(self, job: JobSpec, run_dir: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
        job.check()
        self.job = job
        self.run_dir = run_dir.absolute()
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if any(self.run_dir.iterdir()):
                raise ConfigError(f"the run folder {run_dir} is not empty", do="Give a new folder.")
        except OSError as error:
            raise ConfigError(f"cannot write the run folder {run_dir}", why=error.strerror or str(error)) from error
        self._socket = bind(host, port)
        self.address = Address(*self._socket.getsockname()[:2])
        self.events = self.run_dir / "events.jsonl"
        try:
            Secret.create(self.run_dir / "secret")
            job.save(self.run_dir / "job.json")
            self._log = events.EventLog(self.events, "launcher")
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"cannot write the run folder {run_dir}", why=error.strerror or str(error)) from error
        self._child: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket | None = None
        self.incarnation = 0
        self._pulse_at = 0.0
        self._state = JobState()
        self._orphans: set[int] = set()
        self.processes: set[ProcessId] = set()
        """Every supervisor that was started."""

    @property
    def log(self) -> events.EventLog:
        return self._log

    @property
    def supervisor(self) -> ProcessId | None:
        """The supervisor's process now."""
        return ProcessId.of(self._child.pid) if self._child is not None and self._child.poll() is None else None

    def start(self) -> None:
        """Starts the first supervisor, and with it the job."""
        # Members of a supervisor that dies become ours, not init's: we can reap them.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._spawn()

    def poll(self) -> JobState | None:
        """Looks after the supervisor once. Returns how the job ended, when it has. Call it a few times a second."""
        self._reap_orphans()
        if self._child is None:
            return self._state
        self._read_pulse()
        code = self._child.poll()
        if code is None:
            silent = time.monotonic() - self._pulse_at
            if silent > self.job.config.detect.silence_s:
                self._verdict("hung", "silence", f"no pulse for {silent:.1f} s")
                self._child.kill()
                code = self._child.wait()
                return self._after_death(code, judged=True)
            return None
        return self._after_death(code)

    def _after_death(self, code: int, *, judged: bool = False) -> JobState | None:
        journal = Journal(self.run_dir / "supervisor.db")
        self._state = journal.job()
        self._orphans |= {record.process.pid for record in journal.records() if record.process is not None}
        journal.close()
        if self._state.outcome and code in (0, GAVE_UP_EXIT):
            self._child = None
            return self._state
        if judged:
            return self._bring_back()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        self._verdict("dead", "exit", f"its process was {how}")
        return self._bring_back()

    def wait(self, timeout: float | None = None) -> JobState | None:
        """Polls until the job is over; None when `timeout` seconds pass before."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while deadline is None or time.monotonic() < deadline:
            state = self.poll()
            if state is not None:
                return state
            time.sleep(0.02)
        return None

    def stop(self, grace_s: float = 20.0) -> JobState | None:
        """Asks the supervisor to end the job and waits for it."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
        return self.wait(grace_s)

    def close(self) -> None:
        """Lets go of the socket and the log. A supervisor that still runs sees the lifeline end and stops the job."""
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        if self._child is not None:
            try:
                self._child.wait(self.job.config.restart.grace_s + 10.0)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        self._reap_orphans()
        self._socket.close()
        self._log.close()

    def _bring_back(self) -> JobState | None:
        if self.incarnation > MAX_RESTARTS:
            self._state = JobState("failed", f"the supervisor died {self.incarnation} times")
            self._child = None
            self._end_members()
            self._log.emit(events.JobEnded(outcome=self._state.outcome, cause=self._state.cause))
            return self._state
        whole_job = self.job.config.restart.policy == "whole-job"
        self._log.emit(
            events.PlanMade(
                member=SUPERVISOR + "/0",
                incarnation=self.incarnation,
                actions=("spawn supervisor/0", *((str(RestartJob()),) if whole_job else ())),
                why="the launcher brings it back",
            )
        )
        self._spawn()
        return None

    def _end_members(self) -> None:
        """Without a supervisor to come, its last duty is ours."""
        journal = Journal(self.run_dir / "supervisor.db")
        processes = [record.process for record in journal.records() if record.process is not None]
        journal.close()
        runtime = LocalRuntime(self.run_dir, self.address, self.job.env)

        async def end() -> None:
            await asyncio.gather(*(asyncio.wait_for(runtime.end(one, 0.0), END_SECONDS) for one in processes))

        try:
            asyncio.run(end())
        except TimeoutError:
            self._log.emit(events.Alarm(text="a member cannot be ended"))

    def _spawn(self) -> None:
        self.incarnation += 1
        if self._lifeline is not None:
            self._lifeline.close()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        (self.run_dir / "logs").mkdir(exist_ok=True)
        try:
            with (self.run_dir / "logs" / f"supervisor-0-{self.incarnation}.log").open("ab") as output:
                self._child = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "robustrl.runtime.supervise",
                        str(self.run_dir),
                        str(self.incarnation),
                        str(self._socket.fileno()),
                        str(theirs.fileno()),
                    ],
                    env=os.environ | self.job.env | {"ROBUSTRL_RUN_DIR": str(self.run_dir)},
                    pass_fds=(self._socket.fileno(), theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
        except OSError as error:
            ours.close()
            raise SpawnError("cannot start the supervisor", why=str(error)) from error
        finally:
            theirs.close()
        self._lifeline = ours
        self._pulse_at = time.monotonic() + self.job.config.detect.start_s  # its start is no silence
        self.processes.add(ProcessId.of(self._child.pid))

    def _read_pulse(self) -> None:
        assert self._lifeline is not None
        try:
            if self._lifeline.recv(4096):
                self._pulse_at = time.monotonic()
        except (BlockingIOError, OSError):
            pass

    def _verdict(self, verdict: str, signal_name: str, evidence: str) -> None:
        identity = Identity(Member(SUPERVISOR), self.incarnation)
        self._log.emit(
            events.VerdictReached(
                member=str(identity.member),
                incarnation=identity.incarnation,
                verdict=verdict,
                phase="",
                signal=signal_name,
                evidence=evidence,
            )
        )

    def _reap_orphans(self) -> None:
        """Reaps members that a dead supervisor left to us, by pid: other children of this process are not ours."""
        for pid in list(self._orphans):
            try:
                found, _ = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                found = pid
            if found:
                self._orphans.discard(pid)


def new_run_dir(parent: Path) -> Path:
    """A fresh folder name for one run."""
    return parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
