"""Who is there: the processes of one job, each with its start time, and the shared memory that nobody uses."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

MARK: Final = "ROBUSTRL_TEST_JOB"
"""A variable that all processes of a job inherit, wherever they have gone."""
SHM: Final = Path("/dev/shm")


@dataclass(frozen=True)
class Proc:
    """A process for good: pids are used again, pairs of pid and start time (in ticks since boot) are not."""

    pid: int
    started: int
    title: str = field(compare=False, default="")

    def alive(self) -> bool:
        """False too for one that is dead and not yet taken by its parent."""
        return _started(self.pid) == self.started

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to this process and to no other. Nothing where it is gone."""
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(self.pid)
            try:
                if self.alive():
                    signal.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)


def proc(pid: int) -> Proc | None:
    started = _started(pid)
    title = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return None if started is None else Proc(pid, started, title)


def processes(job: str) -> list[Proc]:
    """All that live and have this job's mark."""
    mark = f"{MARK}={job}".encode()
    marked = (pid for pid in _pids() if mark in _read(f"/proc/{pid}/environ").split(b"\0"))
    return [found for found in map(proc, marked) if found is not None]


def end_all(job: str, limit_s: float = 20.0) -> None:
    """Kills all of a job, what it starts meanwhile included. Raises AssertionError where that does not end."""
    deadline = time.monotonic() + limit_s
    while left := processes(job):
        assert time.monotonic() < deadline, f"cannot be killed: {left}"
        for one in left:
            one.kill()
        time.sleep(0.05)  # between two looks; the deadline above ends it
        for one in left:
            # As the subreaper (tests/conftest.py) we are the parent of those whose parents are gone.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(one.pid, os.WNOHANG)


def segments() -> set[str]:
    """The names in /dev/shm."""
    return {entry.name for entry in SHM.iterdir()} if SHM.is_dir() else set()


def unused_segments(before: set[str]) -> set[str]:
    """Names that were not there before and that no living process has mapped or open: nobody will remove them."""
    new = segments() - before
    if not new:
        return new
    used = {name for pid in _pids() for name in _shared(pid)}
    return (new - used) & segments()


def remove_unused_segments(before: set[str]) -> None:
    """Looks twice: who has just made a name may not have mapped it yet."""
    names = unused_segments(before)
    if names:
        time.sleep(0.5)
        for name in names & unused_segments(before):
            (SHM / name).unlink(missing_ok=True)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _started(pid: int) -> int | None:
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in {b"Z", b"X"} else None


def _shared(pid: int) -> Iterator[str]:
    prefix = f"{SHM}/"
    for line in _read(f"/proc/{pid}/maps").decode(errors="replace").splitlines():
        _, found, name = line.partition(prefix)
        if found:
            yield name
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(fd.readlink())
                if target.startswith(prefix):
                    yield target.removeprefix(prefix)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
