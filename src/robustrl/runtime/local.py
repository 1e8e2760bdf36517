"""Members as processes of this machine, each the leader of a session of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from robustrl.detect import ProcessId, exit_status, start_time
from robustrl.errors import SpawnError
from robustrl.restart.job import RoleSpec
from robustrl.roles import Identity
from robustrl.wire import Address

POLL_S = 0.01


class LocalRuntime:
    """Starts members with `subprocess`, watches them by pidfd, and ends whole process trees.

    Args:
        run_dir: the job's folder; each member's output goes to ``logs/`` in it.
        supervisor: where members find the supervisor.
        env: set for every member on top of our own environment.
    """

    def __init__(self, run_dir: Path, supervisor: Address, env: Mapping[str, str]) -> None:
        self._run_dir = run_dir
        self._supervisor = supervisor
        self._env = dict(env)
        self._watched: dict[ProcessId, list[Callable[[str], None]]] = {}
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)

    async def spawn(self, identity: Identity, role: RoleSpec) -> ProcessId:
        env = os.environ | self._env | member_env(self._run_dir, identity, self._supervisor)
        name = f"{identity.member.role}-{identity.member.index}-{identity.incarnation}.log"
        try:
            with (self._run_dir / "logs" / name).open("ab") as output:
                child = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
                    role.command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise SpawnError(f"cannot start {role.command[0]}", who=identity, why=str(error)) from error
        child.returncode = 0  # reaped by pid, through `exit_status`; Popen must not do it as well
        return ProcessId.of(child.pid)

    def watch(self, process: ProcessId, on_exit: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        if process in self._watched:  # a promoted standby is watched under both of its names; it can be reaped once
            self._watched[process].append(on_exit)
            return
        fd = process.open()
        if fd is None:
            loop.call_soon(on_exit, exit_status(process.pid))
            return
        self._watched[process] = [on_exit]

        def ended() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            how = exit_status(process.pid)
            for told in self._watched.pop(process):
                told(how)

        loop.add_reader(fd, ended)

    async def end(self, process: ProcessId, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        if grace_s > 0 and process.send(signal.SIGTERM):
            while process.alive() and time.monotonic() < deadline:  # noqa: ASYNC110 - another process has no Event
                await asyncio.sleep(POLL_S)
        # Children may have left the group: they are known by their ancestry as long as the parent lives.
        tree = [process, *descendants(process)]
        _kill_group(process)
        for one in tree:
            one.send(signal.SIGKILL)
        while True:
            left = [one for one in tree if one.alive()] or _group(process)
            if not left:
                break
            _kill_group(process)
            for one in left:
                one.send(signal.SIGKILL)
            await asyncio.sleep(POLL_S)
        exit_status(process.pid)


def member_env(run_dir: Path, identity: Identity, supervisor: Address) -> dict[str, str]:
    """What tells a process which member it is."""
    return {
        "ROBUSTRL_RUN_DIR": str(run_dir),
        "ROBUSTRL_MEMBER": str(identity.member),
        "ROBUSTRL_INCARNATION": str(identity.incarnation),
        "ROBUSTRL_SUPERVISOR": str(supervisor),
        "PYTHONUNBUFFERED": "1",
    }


def _all_processes() -> list[tuple[ProcessId, int, int]]:
    """(process, parent's pid, process group) of everything that runs, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                found.append((ProcessId(int(entry.name), int(fields[19])), int(fields[1]), int(fields[2])))
    return found


def descendants(process: ProcessId) -> list[ProcessId]:
    """Children, their children, and so on, of a living process."""
    if not process.alive():
        return []
    children: dict[int, list[ProcessId]] = {}
    for one, parent, _ in _all_processes():
        children.setdefault(parent, []).append(one)
    found, queue = [], [process.pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += [one.pid for one in below]
    return found


def _group(leader: ProcessId) -> list[ProcessId]:
    """Living processes of the group that `leader` led. While a group has members its number is not given again, and
    one that started before the leader did is another's."""
    if start_time(leader.pid) not in (0, leader.started):
        return []  # the number was given again: nobody of the group was left, and its group now is another's
    return [one for one, _, group in _all_processes() if group == leader.pid and one.started >= leader.started]


def _kill_group(leader: ProcessId) -> None:
    if _group(leader):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, signal.SIGKILL)
