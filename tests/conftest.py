"""What all tests share: nothing may outlive a test, and conditions are waited for by polling with a deadline.

This file reads /proc by itself and imports nothing of robustrl: it must not inherit the errors it is to find.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The same examples at each run: a red run can be had again. `--hypothesis-profile explore` draws new ones.
_calm = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("explore", **_calm)
settings.register_profile("robustrl", derandomize=True, **_calm)
settings.load_profile("robustrl")

GRACE_S = 3.0
"""How long after a test its processes and sockets may still be on their way out."""
POLL_S = 0.02
RUN_DIR = b"ROBUSTRL_RUN_DIR="
SEGMENTS = "robustrl"
"""How names of shared-memory segments of robustrl begin. (Its weights lie in memfds, which have no name at all.)"""
_PR_SET_CHILD_SUBREAPER = 36
_HELPERS = (b"multiprocessing.forkserver", b"multiprocessing.resource_tracker")
"""Python's own servers stay for the session; what they fork does not."""

WaitUntil = Callable[..., Any]


def _wait_until(predicate: Callable[[], Any], timeout: float = 15.0, what: str = "") -> Any:
    """Polls until `predicate` returns something true and returns it; fails after `timeout` seconds, saying `what`."""
    deadline = time.monotonic() + timeout
    while True:
        found = predicate()
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"{what or getattr(predicate, '__name__', 'the condition')}: not within {timeout:g} s")
        time.sleep(POLL_S)


@pytest.fixture(scope="session")
def wait_until() -> WaitUntil:
    """``wait_until(predicate, timeout=15.0, what="")``: the first true value that `predicate` returns."""
    return _wait_until


@pytest.fixture(scope="session", autouse=True)
def _adopt_orphans() -> None:
    """Orphans of our children become ours instead of init's: whoever escapes is still found below us."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.fixture(autouse=True)
def _nothing_outlives_a_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    base = os.fsencode(tmp_path_factory.getbasetemp().resolve())
    before = _Scene(base)
    yield
    deadline = time.monotonic() + GRACE_S
    left = _Scene(base).beyond(before)
    while any(left.values()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = _Scene(base).beyond(before)
    _reap(before)
    for (pid, started), _ in left["processes"]:
        _kill(pid, started)
    if any(left.values()):
        told = [f"{kind}: {', '.join(sorted(text for _, text in found))}" for kind, found in left.items() if found]
        pytest.fail("the test left " + "; ".join(told))


class _Scene:
    """Processes, listening sockets and segments that are ours at one moment, each as (key, words)."""

    def __init__(self, base: bytes) -> None:
        table = dict(_table())
        below = _descendants(table, os.getpid())
        self.processes: dict[tuple[int, int], str] = {}
        for pid, (parent, _, started) in table.items():
            if pid == os.getpid():
                continue
            command = _read(f"/proc/{pid}/cmdline")
            if parent == os.getpid() and any(helper in command for helper in _HELPERS):
                continue
            if pid in below or _runs_under(pid, base):
                self.processes[pid, started] = f"{pid} {command.replace(bytes(1), b' ').decode(errors='replace')[:160]}"
        ours = {inode for pid in (os.getpid(), *(pid for pid, _ in self.processes)) for inode in _sockets(pid)}
        self.ports = {inode: str(port) for inode, port in _listening() if inode in ours}
        shm = Path("/dev/shm")
        names = [entry.name for entry in shm.iterdir()] if shm.is_dir() else []
        self.segments = {name: name for name in names if name.startswith(SEGMENTS)}

    def beyond(self, before: _Scene) -> dict[str, list[tuple[Any, str]]]:
        """What is here and was not there."""
        pairs = {
            "processes": (self.processes, before.processes),
            "listening ports": (self.ports, before.ports),
            "shared memory": (self.segments, before.segments),
        }
        return {
            kind: [(key, text) for key, text in now.items() if key not in then] for kind, (now, then) in pairs.items()
        }


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _stat(pid: int) -> tuple[int, str, int] | None:
    """(parent's pid, state, start time)."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return (int(fields[1]), fields[0].decode(), int(fields[19])) if len(fields) > 19 else None


def _table() -> Iterator[tuple[int, tuple[int, str, int]]]:
    """Everything that runs; zombies do not."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            found = _stat(int(entry.name))
            if found is not None and found[1] not in "ZX":
                yield int(entry.name), found


def _descendants(table: dict[int, tuple[int, str, int]], root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue += below
    return found


def _runs_under(pid: int, base: bytes) -> bool:
    for entry in _read(f"/proc/{pid}/environ").split(b"\0"):
        if entry.startswith(RUN_DIR):
            folder = os.path.realpath(entry[len(RUN_DIR) :])
            return folder == base or folder.startswith(base + b"/")
    return False


def _sockets(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    yield int(target[len("socket:[") : -1])


def _listening() -> Iterator[tuple[int, int]]:
    """(inode, port) of every TCP socket that listens."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _read(table).decode().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                yield int(fields[9]), int(fields[1].rpartition(":")[2], 16)


def _kill(pid: int, started: int) -> None:
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            found = _stat(pid)
            if found is not None and found[2] == started:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)


def _reap(before: _Scene) -> None:
    """Takes the zombies that the test left to us as their adoptive parent."""
    known = {pid for pid, _ in before.processes}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in known:
            found = _stat(int(entry.name))
            if found is not None and found[0] == os.getpid() and found[1] == "Z":
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(int(entry.name), os.WNOHANG)
