"""A framework's job as a test sees it: one command, its log, its processes, and nothing of it afterwards.

Each job has a folder of its own with a short path (Ray puts unix sockets there), its own Ray, and stays on loopback.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import census
from census import Proc

POLL_S: Final = 0.1
SETTLE_S: Final = 15.0
"""How long the processes of a job that has ended may be on their way out."""
RAY: Final = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
QUIET: Final = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
NODE: Final = "127.0.0.2"
"""Ray turns 127.0.0.1 into the machine's outer address; this one it leaves as it is."""


class Job:
    """Starts a command on entering and leaves nothing of it on leaving.

    Args:
        command: what is run, in the job's folder.
        env: is added to this process's environment.

    Attributes:
        folder: the job's own; it goes with the job.
        log: what the command writes.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: Path | None = None) -> None:
        self.command, self.env = list(command), dict(env)
        self.folder = folder or new_folder()
        self.log = self.folder / "job.log"
        self.mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._segments: set[str] = set()

    def __enter__(self) -> Self:
        temporary = self.folder / "tmp"
        temporary.mkdir()
        own = {census.MARK: self.mark, "RAY_TMPDIR": str(self.folder), "TMPDIR": str(temporary)}
        self._segments = census.segments()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=os.environ | QUIET | RAY | self.env | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._process is not None and self._process.poll() is None:
                census.end_all(self.mark)
                self._process.wait(SETTLE_S)
            census.end_all(self.mark)
            census.remove_unused_segments(self._segments)
        finally:
            if kind is not None:
                # pytest shows what a failing test wrote.
                print(f"--- the end of {self.log} ---\n{self.text()[-12000:]}")
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the job has not been started"
        return self._process

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait(self, limit_s: float) -> int:
        """The exit code, as a shell gives it. Fails where the job goes on."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job has not ended within {limit_s:g} s") from None
        return code if code >= 0 else 128 - code

    def until(self, condition: Callable[[], Any], limit_s: float, what: str) -> Any:
        """The first true value of `condition`. Fails after the limit, and as soon as the job has ended without it."""
        deadline = time.monotonic() + limit_s
        while True:
            ended = self.process.poll() is not None
            if found := condition():
                return found
            assert not ended, f"{what}: the job ended with {self.process.returncode} before"
            assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s"
            time.sleep(POLL_S)

    def until_said(self, pattern: str, limit_s: float) -> re.Match[str]:
        """The first match in the log."""
        found: re.Match[str] = self.until(lambda: re.search(pattern, self.text()), limit_s, f"{pattern!r} in the log")
        return found

    def stop(self, limit_s: float = 30.0) -> int:
        """Ends the job as Ctrl-C on its terminal does, and returns the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.wait(limit_s)

    def processes(self, title: str = "") -> list[Proc]:
        """The job's living processes whose title has this pattern, oldest first."""
        return sorted(
            (one for one in census.processes(self.mark) if re.search(title, one.title)), key=lambda one: one.started
        )

    def leftovers(self) -> list[str]:
        """What an ended job has left outside its folder, once all had time to go. Empty is as it should be."""
        deadline = time.monotonic() + SETTLE_S
        names = census.unused_segments(self._segments)
        while True:
            # Others on this machine come and go: only what stays unused all the time is left over.
            names &= census.unused_segments(self._segments)
            left = [f"process {one.pid} {one.title}" for one in self.processes()]
            left += [f"shared memory {name}" for name in sorted(names)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(POLL_S)


def new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="rr", dir="/tmp"))
