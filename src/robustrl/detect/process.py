"""Processes by (pid, start time), which names one process for the life of the machine, as a pid alone does not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` from the state on (the command name may hold spaces and brackets)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None


def start_time(pid: int) -> int:
    """The process's start in clock ticks since boot; 0 when there is no such process."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else 0


class ProcessId(msgspec.Struct, frozen=True):
    pid: int
    started: int
    """Clock ticks since boot, as in ``/proc/PID/stat``."""

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        return cls(pid, start_time(pid))

    def alive(self) -> bool:
        """Whether this very process runs (a zombie does not)."""
        fields = _stat_fields(self.pid)
        return fields is not None and int(fields[19]) == self.started and fields[0] not in "ZX"

    def open(self) -> int | None:
        """A pidfd, readable once the process ends; None when it is gone or its pid is another's."""
        try:
            fd = os.pidfd_open(self.pid)
        except (ProcessLookupError, OSError):
            return None
        # The check comes after the open: a pid that was handed on before it shows another start time now.
        if start_time(self.pid) != self.started:
            os.close(fd)
            return None
        return fd

    def send(self, signum: int) -> bool:
        """Sends a signal to this very process. Returns False when it is gone."""
        fd = self.open()
        if fd is None:
            return False
        try:
            signal.pidfd_send_signal(fd, signum)
            return True
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            os.close(fd)


def exit_status(pid: int) -> str:
    """Reaps a child that ended and says how, in words. For a process that is not our child the cause is unknown."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return "ended (exit status unknown: not our child)"
    if found == 0:
        return "still running"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"killed by {signal.Signals(number).name if number in set(signal.Signals) else number}"
    return f"exited with code {os.waitstatus_to_exitcode(status)}"
