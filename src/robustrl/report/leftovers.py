"""What outlived a run: processes, listening ports, shared-memory segments. A run that ended well leaves none."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from robustrl.detect.process import ProcessId, start_time

RUN_DIR = "ROBUSTRL_RUN_DIR"
"""Every process of a run has the run's folder in this variable, and so have the processes that they start."""


def leftovers(
    run_dir: Path | str, spawned: Iterable[tuple[int, int]] = (), ports: Iterable[int] = (), shm_prefix: str = ""
) -> dict[str, list[str]]:
    """Looks for what is still there of a run.

    Args:
        run_dir: the run's folder. A living process with ROBUSTRL_RUN_DIR set to it belongs to the run, whoever
            started it; the calling process itself does not count.
        spawned: (pid, start time in clock ticks as in ``/proc/PID/stat``) of every process ever started for the run.
        ports: TCP ports that the run listened on.
        shm_prefix: how the names of the run's segments in /dev/shm begin; empty looks for none.

    Returns:
        ``processes`` (``"PID command line"``), ``ports`` and ``shared_memory`` (names); empty lists when clean.
    """
    run_dir = os.path.realpath(run_dir)
    homes = {pid: home for pid in _pids() if (home := _run_dir_of(pid))}
    alive = {pid for pid, started in spawned if ProcessId(pid, started).alive()}
    alive |= {pid for pid, home in homes.items() if home == run_dir and ProcessId(pid, start_time(pid)).alive()}
    alive.discard(os.getpid())
    foreign = {inode for pid, home in homes.items() if home != run_dir for inode in _sockets(pid)}
    own = {inode for pid in alive for inode in _sockets(pid)}
    wanted = set(ports)
    listening = {
        port for inode, port in _listening() if inode in own or (port in wanted and inode not in foreign and inode)
    }
    return {
        "processes": [f"{pid} {_command(pid)}".strip() for pid in sorted(alive)],
        "ports": [str(port) for port in sorted(listening)],
        "shared_memory": _segments(shm_prefix),
    }


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _run_dir_of(pid: int) -> str:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ""
    key = f"{RUN_DIR}=".encode()
    found = next((entry for entry in environ.split(b"\0") if entry.startswith(key)), b"")
    return os.path.realpath(os.fsdecode(found[len(key) :])) if found else ""


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words if word)[:200]


def _sockets(pid: int) -> set[int]:
    inodes: set[int] = set()
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return inodes
    for descriptor in descriptors:
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[len("socket:[") : -1]))
    return inodes


def _listening() -> list[tuple[int, int]]:
    """(socket inode, port) of every TCP socket of this network namespace that listens."""
    found: list[tuple[int, int]] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A":  # TCP_LISTEN
                found.append((int(fields[9]), int(fields[1].rpartition(":")[2], 16)))
    return found


def _segments(prefix: str) -> list[str]:
    shm = Path("/dev/shm")
    if not prefix or not shm.is_dir():
        return []
    return sorted(entry.name for entry in shm.iterdir() if entry.name.startswith(prefix))
