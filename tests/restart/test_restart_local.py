"""Members as processes of this machine: what is started can be ended, all of it, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from robustrl.detect import ProcessId
from robustrl.errors import SpawnError
from robustrl.restart import RoleSpec
from robustrl.roles import Identity
from robustrl.runtime.local import LocalRuntime, descendants
from robustrl.wire import Address

ME = Identity.parse("rollout/1#3")

TREE = """
import os, subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
inner = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-S', '-c', {stubborn!r}], start_new_session=True); print(p.pid, flush=True); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-S", "-c", inner], stdout=subprocess.PIPE)
grandchild = int(child.stdout.readline())
with open(os.environ["ROBUSTRL_RUN_DIR"] + "/tree.new", "w") as file:
    file.write(f"{child.pid} {grandchild}")
os.rename(os.environ["ROBUSTRL_RUN_DIR"] + "/tree.new", os.environ["ROBUSTRL_RUN_DIR"] + "/tree")
time.sleep(300)
"""  # noqa: E501


@pytest.fixture
def runtime(tmp_path: Path) -> LocalRuntime:
    return LocalRuntime(tmp_path, Address("127.0.0.1", 7), {"OF_THE_JOB": "yes"})


@pytest.fixture
def bystander() -> Iterator[ProcessId]:
    """A process of somebody else: a sibling, leader of a session of its own."""
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    yield ProcessId.of(child.pid)
    child.kill()
    child.wait()


def tree(tmp_path: Path, wait_until: Any) -> list[ProcessId]:
    text = wait_until(lambda: (tmp_path / "tree").exists() and (tmp_path / "tree").read_text(), 30.0, "the tree")
    return [ProcessId.of(int(pid)) for pid in text.split()]


def spawn(runtime: LocalRuntime, *command: str) -> ProcessId:
    return asyncio.run(runtime.spawn(ME, RoleSpec("rollout", command)))


def end(runtime: LocalRuntime, process: ProcessId, grace_s: float = 0.0) -> None:
    async def run() -> None:
        async with asyncio.timeout(20.0):
            await runtime.end(process, grace_s)

    asyncio.run(run())


def test_a_member_knows_its_place_and_leaves_a_log(runtime: LocalRuntime, tmp_path: Path, wait_until: Any) -> None:
    words = "ROBUSTRL_RUN_DIR ROBUSTRL_MEMBER ROBUSTRL_INCARNATION ROBUSTRL_SUPERVISOR OF_THE_JOB"
    code = f"import os; print(*(os.environ[w] for w in {words.split()!r}), os.getsid(0) == os.getpid())"
    process = spawn(runtime, sys.executable, "-S", "-c", code)
    wait_until(lambda: not process.alive())
    end(runtime, process)
    assert (tmp_path / "logs" / "rollout-1-3.log").read_text().split() == [
        str(tmp_path),
        "rollout/1",
        "3",
        "127.0.0.1:7",
        "yes",
        "True",
    ]


def test_a_whole_tree_ends_even_who_left_the_group_and_others_live_on(
    runtime: LocalRuntime, tmp_path: Path, wait_until: Any, bystander: ProcessId
) -> None:
    process = spawn(runtime, sys.executable, "-S", "-c", TREE)
    child, grandchild = tree(tmp_path, wait_until)
    assert os.getsid(grandchild.pid) == grandchild.pid  # it left the group and the session
    assert {child, grandchild} <= set(descendants(process))
    end(runtime, process)
    assert not any(one.alive() for one in (process, child, grandchild))
    assert bystander.alive()
    with pytest.raises(ChildProcessError):  # reaped: no zombie is left of it
        os.waitpid(process.pid, os.WNOHANG)


def test_a_stopped_tree_ends_too(runtime: LocalRuntime, tmp_path: Path, wait_until: Any) -> None:
    process = spawn(runtime, sys.executable, "-S", "-c", TREE)
    child, grandchild = tree(tmp_path, wait_until)
    for one in (process, child, grandchild):
        assert one.send(signal.SIGSTOP)
    end(runtime, process)
    assert not any(one.alive() for one in (process, child, grandchild))


def test_the_group_of_a_member_that_is_dead_already_ends(
    runtime: LocalRuntime, tmp_path: Path, wait_until: Any
) -> None:
    code = (
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        "path = os.environ['ROBUSTRL_RUN_DIR'] + '/tree'\n"
        "open(path + '.new', 'w').write(str(child.pid)); os.rename(path + '.new', path); time.sleep(300)\n"
    )
    process = spawn(runtime, sys.executable, "-S", "-c", code)
    (child,) = tree(tmp_path, wait_until)
    process.send(signal.SIGKILL)
    wait_until(lambda: not process.alive())
    assert child.alive()
    end(runtime, process)
    assert not child.alive()


def test_who_was_given_the_pid_of_a_dead_member_is_left_alone(runtime: LocalRuntime, bystander: ProcessId) -> None:
    dead = ProcessId(bystander.pid, bystander.started - 1)
    assert descendants(dead) == []
    end(runtime, dead)
    end(runtime, dead, 0.2)
    assert bystander.alive()


def test_a_member_that_obeys_ends_within_its_grace_and_one_that_does_not_is_killed(
    runtime: LocalRuntime, tmp_path: Path, wait_until: Any
) -> None:
    obeying = spawn(runtime, "sleep", "300")
    end(runtime, obeying, 20.0)  # fails by its deadline when the grace is waited for in vain
    assert not obeying.alive()
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(os.environ['ROBUSTRL_RUN_DIR'] + '/deaf', 'w').close(); time.sleep(300)\n"
    )
    deaf = spawn(runtime, sys.executable, "-S", "-c", code)
    wait_until((tmp_path / "deaf").exists)
    begun = time.monotonic()
    end(runtime, deaf, 0.3)
    assert not deaf.alive()
    assert time.monotonic() - begun >= 0.3


def test_ending_what_is_gone_is_no_error(runtime: LocalRuntime, wait_until: Any) -> None:
    process = spawn(runtime, "true")
    wait_until(lambda: not process.alive())
    end(runtime, process)
    end(runtime, process)


@pytest.mark.parametrize("command", ["/nowhere/robustrl-test", "/"])
def test_a_command_that_cannot_be_started_is_a_spawn_error(runtime: LocalRuntime, command: str) -> None:
    with pytest.raises(SpawnError) as caught:
        spawn(runtime, command)
    assert "rollout/1#3" in str(caught.value)
    assert f"cannot start {command}" in str(caught.value)
