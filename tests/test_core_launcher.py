"""A job of real processes, without tensors: whoever is struck is brought back, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from robustrl import events
from robustrl.config import RobustConfig
from robustrl.detect import ProcessId
from robustrl.errors import ConfigError, FencedError, HandshakeRefusedError
from robustrl.restart import JobSpec, Journal, RoleSpec
from robustrl.restart.journal import JobState
from robustrl.roles import Identity, Member
from robustrl.runtime import launcher as launcher_module
from robustrl.runtime.launcher import Launcher
from robustrl.wire import RpcClient, Secret, bind

MEMBER = '''
"""A member of any role. It serves, and does what the file with its name in the orders folder says."""
import os, sys, time
from pathlib import Path
import robustrl
from robustrl.roles import Identity
from robustrl.runtime.guard import Guard
from robustrl.runtime.loop import shared_loop

run_dir = Path(os.environ["ROBUSTRL_RUN_DIR"])


def order(name):
    try:
        path = (run_dir.parent / "orders" / name).rename(run_dir.parent / "orders" / f"{name}.{os.getpid()}")
    except FileNotFoundError:
        return ""
    return path.read_text()


def break_the_engine():
    raise ValueError("the engine broke")


def serve(prepared=None):
    me = Guard()
    name = f"{me.identity.member.role}-{me.identity.member.index}"
    # Who was here before must be gone before we are.
    before = run_dir.parent / f"{name}.pid"
    if before.exists():
        try:
            state = Path(f"/proc/{before.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = "X"
        if state not in "ZX":
            (run_dir.parent / f"overlap-{name}").touch()
    new = before.with_suffix(f".{os.getpid()}")
    new.write_text(str(os.getpid()))
    new.rename(before)
    with me:
        shared_loop().run(me.link.say("serving"), 30.0)
        while not me.stopping:
            what = order(name)
            if what == "exit0":
                os._exit(0)
            elif what == "raise":
                break_the_engine()
            elif what == "sysexit":
                sys.exit(3)
            elif what == "finish":
                break
            me.cell.move()
            time.sleep(0.01)
    if me.identity.member.role == "trainer":  # what a trainer may do at its end: save its model
        time.sleep(0.7)
        (run_dir.parent / "model").touch()


if __name__ == "__main__":
    if os.environ["ROBUSTRL_MEMBER"].startswith("standby"):
        robustrl.standby(dict, {"rollout": serve, "trainer": serve})
    else:
        serve()
'''

LAUNCH = """
import sys
from pathlib import Path
from robustrl.restart import JobSpec
from robustrl.runtime.launcher import Launcher

launcher = Launcher(JobSpec.load(Path(sys.argv[1])), Path(sys.argv[2]))
launcher.start()
launcher.wait()
"""

PATIENT = {"detect": {"heartbeat_s": 0.1, "silence_s": 20.0}, "restart": {"grace_s": 5.0}}
"""Silence is no matter in most tests: a busy machine must not look like a failure."""
STRICT = {"detect": {"heartbeat_s": 0.1, "silence_s": 2.5}, "restart": {"grace_s": 5.0}}


def describe(folder: Path, config: dict[str, Any], *, standbys: int = 0, **commands: tuple[str, ...]) -> JobSpec:
    script = folder / "member.py"
    script.write_text(MEMBER)
    (folder / "orders").mkdir()
    command = (sys.executable, str(script))
    return JobSpec(
        roles=(
            RoleSpec("manager", commands.get("manager", command)),
            RoleSpec("trainer", command),
            RoleSpec("rollout", command, 2),
            RoleSpec("standby", command, standbys, ("rollout", "trainer")),
        ),
        config=RobustConfig.from_dict(config),
    )


class Job:
    """A job and what its log says of it. It is looked after while something is waited for."""

    def __init__(self, folder: Path, spec: JobSpec, wait_until: Callable[..., Any]) -> None:
        self.folder = folder
        self.launcher = Launcher(spec, folder / "run")
        self.ended: JobState | None = None
        self._wait_until = wait_until
        self._reader = events.EventReader(self.launcher.events)
        self._events: list[Any] = []
        self.launcher.start()

    def until(self, predicate: Callable[[], Any], what: str, timeout: float = 30.0) -> Any:
        def look() -> Any:
            if self.ended is None:
                self.ended = self.launcher.poll()
            return predicate()

        try:
            return self._wait_until(look, timeout, what)
        except BaseException:
            print(*self.log(events.Event), sep="\n")
            raise

    def log(self, kind: type[events.E], **fields: Any) -> list[Any]:
        self._events += self._reader.poll()
        return [
            event
            for event in self._events
            if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items())
        ]

    def serves(self, identity: str) -> int:
        """The process of an incarnation, once it serves (a standby: once it is warm)."""
        member, _, incarnation = identity.partition("#")
        state = "standby" if member.startswith("standby") else "serving"
        found = self.log(events.MemberMoved, member=member, incarnation=int(incarnation), after=state)
        return found[-1].pid if found else 0

    def all_serve(self, *identities: str) -> dict[str, ProcessId]:
        return {
            name: ProcessId.of(self.until(lambda name=name: self.serves(name), f"{name} serves"))
            for name in identities or ("manager/0#1", "trainer/0#1", "rollout/0#1", "rollout/1#1")
        }

    def starts(self) -> list[str]:
        return [f"{e.member}#{e.incarnation}" for e in self.log(events.MemberMoved, after="starting")]

    def order(self, name: str, what: str) -> None:
        new = self.folder / "orders" / "new"
        new.write_text(what)
        new.rename(self.folder / "orders" / name)

    def finish(self) -> JobState:
        """Lets the trainer finish, and with it the job."""
        self.order("trainer-0", "finish")
        state = self.until(lambda: self.ended, "the job's end")
        assert isinstance(state, JobState)
        assert (state.outcome, state.cause) == ("finished", "")
        assert [e.outcome for e in self.log(events.JobEnded)] == ["finished"]
        assert not list(self.folder.glob("overlap-*")), "a replacement started before its predecessor was gone"
        return state

    def close(self) -> None:
        if self.ended is None:
            self.launcher.stop(30.0)
        self.launcher.close()


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path, wait_until: Callable[..., Any]) -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(config: dict[str, Any], **more: Any) -> Job:
        jobs.append(Job(tmp_path, describe(tmp_path, config, **more), wait_until))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def kill(process: ProcessId, signum: int = signal.SIGKILL) -> None:
    assert process.send(signum)


# -- the whole job ------------------------------------------------------------------------------------------------


def test_a_job_begins_finishes_and_lets_its_trainer_save_the_model(start: Start, tmp_path: Path) -> None:
    job = start(PATIENT)
    processes = job.all_serve()
    job.finish()
    assert (tmp_path / "model").exists()
    assert not any(process.alive() for process in processes.values())
    assert job.starts() == ["manager/0#1", "trainer/0#1", "rollout/0#1", "rollout/1#1"]
    assert not job.log(events.VerdictReached)


def test_stopping_the_launcher_ends_everything(start: Start) -> None:
    job = start(PATIENT)
    processes = job.all_serve()
    state = job.launcher.stop(30.0)
    assert state is not None and state.outcome == "failed" and "SIGTERM" in state.cause
    assert not any(process.alive() for process in processes.values())
    job.ended = state


# -- the supervisor -----------------------------------------------------------------------------------------------


def test_a_killed_supervisor_comes_back_and_takes_the_members_over_as_they_are(start: Start) -> None:
    job = start(PATIENT)
    processes = job.all_serve()
    first = job.launcher.supervisor
    assert first is not None
    kill(first)
    job.until(
        lambda: job.log(events.MemberReady, member="supervisor/0", incarnation=2, milestone="serving"), "the successor"
    )
    assert job.log(events.VerdictReached, member="supervisor/0", signal="exit")
    (found,) = job.log(events.MemberReady, member="supervisor/0", incarnation=2, milestone="reloaded")
    assert found.detail.startswith("4 of 4")
    assert all(process.alive() for process in processes.values())
    # It can do all that the first could: a member that dies now is replaced.
    kill(processes["rollout/0#1"])
    job.all_serve("rollout/0#2")
    assert all(process.alive() for name, process in processes.items() if name != "rollout/0#1")
    job.finish()
    assert job.starts() == ["manager/0#1", "trainer/0#1", "rollout/0#1", "rollout/1#1", "rollout/0#2"]


def test_a_member_that_dies_with_the_supervisor_is_replaced_by_its_successor(start: Start) -> None:
    job = start(PATIENT)
    processes = job.all_serve()
    first = job.launcher.supervisor
    assert first is not None
    kill(first, signal.SIGSTOP)  # it must not see what happens
    kill(processes["rollout/1#1"])
    kill(first)
    job.all_serve("rollout/1#2")
    assert all(process.alive() for name, process in processes.items() if name != "rollout/1#1")
    job.finish()


def test_a_stopped_supervisor_loses_its_pulse_and_is_replaced(start: Start) -> None:
    job = start(STRICT)
    processes = job.all_serve()
    first = job.launcher.supervisor
    assert first is not None
    kill(first, signal.SIGSTOP)
    job.until(
        lambda: job.log(events.MemberReady, member="supervisor/0", incarnation=2, milestone="serving"), "the successor"
    )
    (verdict,) = job.log(events.VerdictReached, member="supervisor/0")
    assert (verdict.verdict, verdict.signal) == ("hung", "silence")
    assert not first.alive()
    assert all(process.alive() for process in processes.values())
    job.finish()
    assert len(job.starts()) == 4


def test_a_supervisor_that_dies_too_often_ends_the_job_and_all_of_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_module, "MAX_RESTARTS", 0)
    job = start(PATIENT)
    processes = job.all_serve()
    first = job.launcher.supervisor
    assert first is not None
    kill(first)
    state = job.until(lambda: job.ended, "the job's end")
    assert state.outcome == "failed" and "supervisor died" in state.cause
    assert not any(process.alive() for process in processes.values())
    assert [e.outcome for e in job.log(events.JobEnded)] == ["failed"]


# -- members ------------------------------------------------------------------------------------------------------


def test_a_killed_member_alone_is_replaced(start: Start) -> None:
    job = start(PATIENT)
    processes = job.all_serve()
    kill(processes["manager/0#1"])
    job.all_serve("manager/0#2")
    (verdict,) = job.log(events.VerdictReached)
    assert (verdict.member, verdict.verdict, verdict.signal) == ("manager/0", "dead", "exit")
    assert "killed by SIGKILL" in verdict.evidence
    assert all(process.alive() for name, process in processes.items() if name != "manager/0#1")
    job.finish()


def test_a_member_that_exits_with_code_0_and_without_a_word_has_failed(start: Start) -> None:
    job = start(PATIENT)
    job.all_serve()
    job.order("rollout-0", "exit0")
    job.all_serve("rollout/0#2")
    (verdict,) = job.log(events.VerdictReached)
    assert (verdict.verdict, verdict.signal) == ("dead", "exit")
    assert "exited with code 0" in verdict.evidence
    job.finish()


@pytest.mark.parametrize(
    ("order", "words"),
    [("raise", ("break_the_engine", "ValueError: the engine broke")), ("sysexit", ("SystemExit: 3",))],
)
def test_a_member_that_raises_says_why_with_its_traceback(start: Start, order: str, words: tuple[str, ...]) -> None:
    job = start(PATIENT)
    job.all_serve()
    job.order("rollout-1", order)
    job.all_serve("rollout/1#2")
    (verdict,) = job.log(events.VerdictReached)
    assert (verdict.member, verdict.verdict, verdict.signal) == ("rollout/1", "dead", "report")
    assert "Traceback" in verdict.evidence
    assert all(word in verdict.evidence for word in words)
    job.finish()


def test_a_member_that_has_finished_may_go(start: Start) -> None:
    job = start(PATIENT)
    processes = job.all_serve()
    job.order("rollout-1", "finish")
    job.until(lambda: job.log(events.MemberMoved, member="rollout/1", after="finished"), "its state")
    job.until(lambda: not processes["rollout/1#1"].alive(), "its exit")
    job.finish()
    assert not job.log(events.VerdictReached)


def test_a_stopped_member_is_hung_and_gone_before_its_replacement_starts_and_fenced_for_ever(start: Start) -> None:
    job = start(STRICT)
    processes = job.all_serve()
    old = processes["rollout/0#1"]
    kill(old, signal.SIGSTOP)
    job.all_serve("rollout/0#2")
    assert not old.alive()
    (verdict,) = job.log(events.VerdictReached)
    assert (verdict.verdict, verdict.signal) == ("hung", "silence")
    secret = Secret.read(job.launcher.run_dir / "secret")

    async def call(identity: str) -> None:
        rpc = RpcClient(lambda: job.launcher.address, Identity.parse(identity), secret, patience_s=10.0)
        try:
            await rpc.call("job.status")
        finally:
            await rpc.close()

    with pytest.raises(FencedError, match="rollout/0#2"):  # as one that was woken again would hear
        asyncio.run(call("rollout/0#1"))
    with pytest.raises(HandshakeRefusedError, match="nobody started"):
        asyncio.run(call("rollout/0#9"))
    assert job.log(events.Refused, what="connect", identity="rollout/0#1")
    job.finish()


def test_a_standby_takes_the_place_with_its_own_process_and_is_watched_as_what_it_is_now(start: Start) -> None:
    job = start(PATIENT, standbys=1)
    processes = job.all_serve("manager/0#1", "trainer/0#1", "rollout/0#1", "rollout/1#1", "standby/0#1")
    kill(processes["rollout/0#1"])
    promoted = job.all_serve("rollout/0#2")["rollout/0#2"]
    assert promoted == processes["standby/0#1"]
    job.all_serve("standby/0#2")
    kill(promoted)
    job.all_serve("rollout/0#3", "standby/0#3")
    verdict = job.log(events.VerdictReached)[-1]
    assert (verdict.member, verdict.incarnation) == ("rollout/0", 2)
    assert "killed by SIGKILL" in verdict.evidence
    job.finish()


def test_a_member_that_cannot_be_started_ends_the_job_with_the_reason(start: Start) -> None:
    job = start(PATIENT, manager=("/nowhere/manager",))
    state = job.until(lambda: job.ended, "the job's end", 60.0)
    assert state.outcome == "failed"
    assert "cannot start /nowhere/manager" in state.cause and "manager/0#1" in state.cause
    assert any("restart the whole job" in plan.actions for plan in job.log(events.PlanMade))


# -- the launcher -------------------------------------------------------------------------------------------------


def launched(folder: Path, config: dict[str, Any], wait_until: Callable[..., Any]) -> Iterator[Any]:
    """A job whose launcher is a process of its own: (launcher, supervisor, members)."""
    describe(folder, config).save(folder / "spec.json")
    process = subprocess.Popen([sys.executable, "-c", LAUNCH, str(folder / "spec.json"), str(folder / "run")])
    reader = events.EventReader(folder / "run" / "events.jsonl")
    served: dict[str, ProcessId] = {}

    def all_serve() -> bool:
        for event in events.of_kind(reader.poll(), events.MemberMoved):
            if event.after == "serving":
                served[event.member] = ProcessId.of(event.pid)
        return len(served) == 5

    try:
        wait_until(all_serve, 30.0, "the job serves")
        yield process, served.pop("supervisor/0"), list(served.values())
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def patient_job(tmp_path: Path, wait_until: Callable[..., Any]) -> Iterator[Any]:
    yield from launched(tmp_path, PATIENT, wait_until)


@pytest.fixture
def short_lease_job(tmp_path: Path, wait_until: Callable[..., Any]) -> Iterator[Any]:
    config = {"detect": {"heartbeat_s": 0.1, "silence_s": 1.0}, "restart": {"member_lease_s": 1.0}}
    yield from launched(tmp_path, config, wait_until)


def test_when_the_launcher_is_killed_everything_ends_by_itself(
    patient_job: Any, tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    process, supervisor, members = patient_job
    process.kill()
    wait_until(lambda: not any(one.alive() for one in (supervisor, *members)), 20.0, "the end of all")
    (ended,) = events.of_kind(events.read_events(tmp_path / "run" / "events.jsonl"), events.JobEnded)
    assert ended.outcome == "failed" and "launcher is gone" in ended.cause


def test_members_stop_themselves_when_no_supervisor_comes_back(
    short_lease_job: Any, tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    process, supervisor, members = short_lease_job
    process.kill()
    kill(supervisor)
    wait_until(lambda: not any(one.alive() for one in members), 20.0, "the members' end")
    logs = [path.read_text() for path in (tmp_path / "run" / "logs").glob("*-1.log") if "supervisor" not in path.name]
    assert len(logs) == 4
    assert all("ends itself: no supervisor for" in text for text in logs)
    journal = Journal(tmp_path / "run" / "supervisor.db")
    assert journal.job() == JobState()  # nobody told them to
    journal.close()


def simple(count: int = 1) -> JobSpec:
    return JobSpec(roles=(RoleSpec("trainer", ("true",), count),))


def test_a_port_in_use_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with bind() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            Launcher(simple(), tmp_path / "run", port=port)
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("how", ["not empty", "a file", "no permission"])
def test_a_run_folder_that_cannot_be_used_is_refused(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    if how == "not empty":
        run.mkdir()
        (run / "events.jsonl").touch()
    elif how == "a file":
        run.touch()
    else:

        def refused(path: Path) -> Secret:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Secret, "create", refused)
    with pytest.raises(ConfigError, match="run folder"):
        Launcher(simple(), run)


def test_a_job_without_a_trainer_is_refused_before_the_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trainer"):
        Launcher(JobSpec(roles=(RoleSpec("rollout", ("true",)),)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_supervisors_memory_names_each_member_once(start: Start) -> None:
    job = start(PATIENT)
    processes = job.all_serve()
    journal = Journal(job.launcher.run_dir / "supervisor.db")
    records = {str(record.identity): record.process for record in journal.records() if record.incarnation}
    journal.close()
    assert records == processes
    assert Member("trainer") in {Identity.parse(name).member for name in records}
    assert os.getpid() not in {process.pid for process in processes.values()}
    job.finish()
