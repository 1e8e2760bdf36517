"""One job of the rig, seen from outside: what a scenario waits for, does, and asserts."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rig.script import Script, gate

from robustrl import events
from robustrl.config import DetectConfig, RobustConfig
from robustrl.detect import ProcessId
from robustrl.report.leftovers import leftovers
from robustrl.restart import JobSpec, Journal, RoleSpec
from robustrl.restart.journal import JobState
from robustrl.restart.membership import MemberRecord
from robustrl.runtime.launcher import Launcher

FOLDER = Path(__file__).parents[1]
LIMIT_S = 60.0
"""For conditions that have no limit of their own in the scenario: far above what a loaded machine needs."""
DETECT = DetectConfig(heartbeat_s=0.2, silence_s=3.0)
T = TypeVar("T")
E = TypeVar("E", bound=events.Event)


class Job:
    """A running job of the rig: 3 rollouts, a trainer, a manager."""

    def __init__(self, run_dir: Path, script: Script, config: RobustConfig) -> None:
        def command(name: str) -> tuple[str, ...]:
            return (sys.executable, str(FOLDER / "rig" / f"{name}.py"))

        spec = JobSpec(
            roles=(
                RoleSpec("manager", command("manager")),
                RoleSpec("trainer", command("trainer")),
                RoleSpec("rollout", command("rollout"), script.rollouts),
            ),
            config=config,
            env=script.env() | {"PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1"},
        )
        self.run_dir = run_dir
        self.script = script
        self.launcher = Launcher(spec, run_dir)
        self.state: JobState | None = None
        self.spawned: set[ProcessId] = set()
        self._reader = events.EventReader(self.launcher.events)
        self._events: list[events.Event] = []

    # -- time passes only here -------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], T | None], limit_s: float = LIMIT_S) -> T:
        """Looks after the job until `condition` holds; fails with the job's story when it does not in time."""
        deadline = time.monotonic() + limit_s
        while True:
            self._look()
            value = condition()
            if value:
                return value
            assert self.state is None, f"the job ended before: {self.state}\n{self.story()}"
            assert time.monotonic() < deadline, f"not within {limit_s:g} s; state {self.state}\n{self.story()}"
            time.sleep(0.02)

    def end(self, limit_s: float = LIMIT_S) -> JobState:
        """Waits for the job's end."""
        return self.until(lambda: self.state, limit_s)

    def _look(self) -> None:
        if self.state is None:
            self.state = self.launcher.poll()
        self.spawned |= {record.process for record in self.records() if record.process is not None}

    # -- what is seen ----------------------------------------------------------------------------------------------

    def logged(self, kind: type[E]) -> list[E]:
        self._events += self._reader.poll()
        return list(events.of_kind(self._events, kind))

    def told(self, who: str = "", saw: str = "") -> list[dict[str, Any]]:
        """What the members' own scripts reported."""
        path = self.run_dir / "told.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        rows = [msgspec.json.decode(line) for line in lines]
        return [row for row in rows if row["who"].startswith(who) and saw in ("", row["saw"])]

    def batches(self) -> list[dict[str, Any]]:
        return self.told("trainer/", "batch")

    def records(self) -> list[MemberRecord]:
        journal = Journal(self.run_dir / "supervisor.db")
        try:
            return journal.records()
        finally:
            journal.close()

    def process(self, member: str) -> ProcessId:
        """The member's process now."""
        found = next(record.process for record in self.records() if str(record.member) == member)
        assert found is not None
        return found

    def lives(self) -> dict[str, list[int]]:
        """The incarnations that each member had."""
        found: dict[str, list[int]] = {}
        for moved in self.logged(events.MemberMoved):
            if moved.after == "starting":
                found.setdefault(moved.member, []).append(moved.incarnation)
        return found

    def serving(self, member: str, incarnation: int = 1) -> float | None:
        """When this incarnation began to serve."""
        return next(
            (
                moved.t
                for moved in self.logged(events.MemberMoved)
                if (moved.member, moved.incarnation, moved.after) == (member, incarnation, "serving")
            ),
            None,
        )

    def phases(self) -> dict[str, str]:
        """The phase that each member said last."""
        return {entered.member: entered.phase for entered in self.logged(events.PhaseEntered)}

    def verdicts(self) -> list[events.VerdictReached]:
        return self.logged(events.VerdictReached)

    def story(self) -> str:
        """The log and the members' output, for a failed assertion."""
        lines = [repr(event) for event in self.logged(events.Event)][-60:]
        for path in sorted((self.run_dir / "logs").glob("*.log")):
            lines += [f"-- {path.name}", path.read_text()[-1500:]]
        return "\n".join(lines)

    # -- what is done ----------------------------------------------------------------------------------------------

    def open(self, name: str) -> float:
        """Opens a gate; returns when (wall time)."""
        gate(self.run_dir, name).touch()
        return time.time()

    def kill(self, *members: str) -> float:
        """SIGKILLs members, all at once; returns when (wall time)."""
        processes = [self.process(member) for member in members]
        at = time.time()
        for process in processes:
            assert process.send(signal.SIGKILL)
        return at

    def close(self) -> None:
        try:
            if self.state is None:
                self.launcher.stop()
        finally:
            self.launcher.close()

    def assert_only_touched(self, *members: str) -> None:
        """Nobody but these was replaced, and the others' own word is that they are who they were."""
        lives = self.lives()
        others = {member: numbers for member, numbers in lives.items() if member not in members}
        assert all(numbers == [1] for numbers in others.values()), lives
        for row in self.told():
            assert int(row["who"].partition("#")[2]) in lives[row["who"].partition("#")[0]]
        pids = {row["who"]: {one["pid"] for one in self.told(row["who"])} for row in self.told()}
        assert all(len(found) == 1 for found in pids.values()), pids

    def assert_nothing_left(self) -> None:
        left = leftovers(
            self.run_dir,
            [(p.pid, p.started) for p in self.spawned | self.launcher.processes],
            ports=[self.launcher.address.port],
            shm_prefix=f"robustrl-{self.run_dir.name}",
        )
        assert left == {"processes": [], "ports": [], "shared_memory": []}


StartJob = Callable[..., Job]
