from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from robustrl.detect.process import start_time
from robustrl.events import Event, FaultInjected, MemberReady, StepDone
from robustrl.inject import Injector, Target, parse

LIMIT_S = 10.0


@pytest.fixture
def sleeper() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def done(step: int) -> StepDone:
    return StepDone(step=step, incarnation=1)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about in time"
        time.sleep(0.005)


def test_a_fault_strikes_when_its_step_is_in_work_and_only_once(sleeper: Callable[[], subprocess.Popen[bytes]]) -> None:
    victim, other = sleeper(), sleeper()
    members = {"rollout/1": Target(3, victim.pid, start_time(victim.pid)), "rollout/0": Target(1, other.pid)}
    said: list[Event] = []
    injector = Injector(parse("kill rollout/1 at step 4"), lambda: members, said.append)
    assert injector.poll([done(1), done(2)]) == []
    assert injector.poll([done(3)]) == list(parse("kill rollout/1 at step 4"))
    assert victim.wait(LIMIT_S) == -signal.SIGKILL
    assert said == [FaultInjected(kind="kill", member="rollout/1", incarnation=3, step=4, pid=victim.pid)]
    # The step is redone by a trainer that came back, and the member has a new process.
    members["rollout/1"] = Target(4, other.pid)
    assert injector.poll([done(3), done(3)]) == []
    assert other.poll() is None
    assert injector.pending == ()


def test_the_event_is_written_before_the_signal(sleeper: Callable[[], subprocess.Popen[bytes]]) -> None:
    victim = sleeper()
    states: list[str] = []
    injector = Injector(
        parse("kill trainer at step 2"),
        lambda: {"trainer/0": Target(1, victim.pid)},
        lambda event: states.append(state_of(victim.pid)),
    )
    injector.poll([done(1)])
    assert len(states) == 1
    assert states[0] in "RSD"
    assert victim.wait(LIMIT_S) == -signal.SIGKILL


def test_stop_freezes_the_process(sleeper: Callable[[], subprocess.Popen[bytes]]) -> None:
    victim = sleeper()
    injector = Injector(
        parse("stop rollout/0 at step 2"), lambda: {"rollout/0": Target(1, victim.pid)}, lambda event: None
    )
    injector.poll([done(1)])
    until(lambda: state_of(victim.pid) == "T")


def test_a_fault_of_the_first_step_waits_for_the_trainer(sleeper: Callable[[], subprocess.Popen[bytes]]) -> None:
    victim = sleeper()
    injector = Injector(
        parse("term manager at step 1"), lambda: {"manager/0": Target(1, victim.pid)}, lambda event: None
    )
    assert injector.poll([MemberReady(member="rollout/0", incarnation=1, milestone="serving")]) == []
    assert injector.poll([MemberReady(member="trainer/0", incarnation=1, milestone="serving")])
    assert victim.wait(LIMIT_S) == -signal.SIGTERM


def test_a_delay_counts_from_the_start_of_the_step(sleeper: Callable[[], subprocess.Popen[bytes]]) -> None:
    victim, clock = sleeper(), Clock()
    injector = Injector(
        parse("kill trainer at step 2 +0.5s"), lambda: {"trainer/0": Target(1, victim.pid)}, lambda event: None, clock
    )
    assert injector.poll([done(1)]) == []
    clock.now += 0.49
    assert injector.poll([done(2)]) == []
    clock.now += 0.02
    assert injector.poll([])
    assert victim.wait(LIMIT_S) == -signal.SIGKILL


def test_a_member_that_is_away_is_waited_for(sleeper: Callable[[], subprocess.Popen[bytes]]) -> None:
    gone, victim = sleeper(), sleeper()
    stale = Target(1, gone.pid, start_time(gone.pid))
    gone.kill()
    gone.wait()
    members: dict[str, Target] = {}
    said: list[Event] = []
    injector = Injector(parse("kill rollout/0 at step 2"), lambda: members, said.append)
    assert injector.poll([done(1)]) == []
    members["rollout/0"] = stale
    assert injector.poll([]) == []
    members["rollout/0"] = Target(2, victim.pid)
    assert len(injector.poll([])) == 1
    assert len(said) == 1


def test_a_pid_that_was_handed_on_is_not_struck(sleeper: Callable[[], subprocess.Popen[bytes]]) -> None:
    stranger = sleeper()
    said: list[Event] = []
    injector = Injector(
        parse("kill rollout/0 at step 2"),
        lambda: {"rollout/0": Target(1, stranger.pid, start_time(stranger.pid) - 1)},
        said.append,
    )
    assert injector.poll([done(1)]) == []
    assert stranger.poll() is None
    assert said == []


def test_faults_with_a_phase_are_left_to_the_member(sleeper: Callable[[], subprocess.Popen[bytes]]) -> None:
    victim = sleeper()
    injector = Injector(
        parse("kill trainer at step 2 in train"), lambda: {"trainer/0": Target(1, victim.pid)}, lambda event: None
    )
    assert injector.poll([done(1), done(2), done(3)]) == []
    assert victim.poll() is None
