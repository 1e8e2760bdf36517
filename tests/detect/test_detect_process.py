"""Real processes: who lives, how an end is noticed, and what outlives a SIGKILL."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robustrl.detect import ProcessId, ProgressCell, exit_status, start_time
from robustrl.runtime.local import LocalRuntime
from robustrl.wire import Address

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(*command: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_process_is_known_by_its_pid_and_its_start(start: Start) -> None:
    child = start("sleep", "60")
    found = ProcessId.of(child.pid)
    assert found.alive()
    assert found.started == start_time(child.pid) > 0
    # Another process that had the same pid before.
    earlier = ProcessId(child.pid, found.started - 1)
    assert not earlier.alive()
    assert earlier.open() is None
    assert not earlier.send(signal.SIGKILL)
    assert found.alive()


def test_a_zombie_is_not_alive_and_what_is_gone_is_nobody(start: Start, wait_until: Any) -> None:
    child = start("sleep", "60")
    found = ProcessId.of(child.pid)
    assert found.send(signal.SIGKILL)
    wait_until(lambda: not found.alive())
    assert start_time(child.pid) == found.started  # still in the table: a zombie
    assert exit_status(child.pid) == "killed by SIGKILL"
    assert start_time(child.pid) == 0
    assert not found.alive()
    assert found.open() is None
    assert not found.send(signal.SIGTERM)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os._exit(0)", "exited with code 0"),
        ("import os; os._exit(71)", "exited with code 71"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 3)", f"killed by {signal.SIGRTMIN + 3}"),
    ],
)
def test_how_a_child_ended_is_said_in_words(start: Start, code: str, words: str) -> None:
    child = start(sys.executable, "-S", "-c", code)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert exit_status(child.pid) == words


def test_an_end_that_is_not_ours_to_know_is_said_so(start: Start) -> None:
    assert exit_status(start("sleep", "60").pid) == "still running"
    assert "unknown" in exit_status(1)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def runtime(tmp_path: Path) -> LocalRuntime:
    return LocalRuntime(tmp_path, Address("127.0.0.1", 1), {})


def test_a_sigkill_is_noticed_at_once_through_the_pidfd(start: Start, runtime: LocalRuntime) -> None:
    child = start("sleep", "60")

    async def run() -> tuple[str, float]:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        runtime.watch(ProcessId.of(child.pid), ended.set_result)
        await asyncio.sleep(0)
        assert not ended.done()
        begun = time.monotonic()
        child.kill()
        async with asyncio.timeout(10.0):
            return await ended, time.monotonic() - begun

    how, seconds = asyncio.run(run())
    assert how == "killed by SIGKILL"
    assert seconds < 3.0


def test_everyone_who_watches_a_process_hears_once_how_it_ended(start: Start, runtime: LocalRuntime) -> None:
    child = start("sleep", "60")
    process = ProcessId.of(child.pid)

    async def run() -> None:
        heard: list[tuple[int, str]] = []
        runtime.watch(process, lambda how: heard.append((1, how)))
        runtime.watch(process, lambda how: heard.append((2, how)))
        fds = open_descriptors()
        child.kill()
        async with asyncio.timeout(10.0):
            while len(heard) < 2:  # noqa: ASYNC110 - a callback has no Event
                await asyncio.sleep(0.005)
        runtime.watch(process, lambda how: heard.append((3, how)))  # gone already
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert heard[:2] == [(1, "killed by SIGKILL"), (2, "killed by SIGKILL")]
        assert [who for who, _ in heard] == [1, 2, 3]
        assert open_descriptors() < fds

    asyncio.run(run())


def test_a_process_that_took_over_the_pid_is_not_watched(start: Start, runtime: LocalRuntime) -> None:
    child = start("sleep", "60")

    async def run() -> str:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        runtime.watch(ProcessId(child.pid, start_time(child.pid) - 1), ended.set_result)
        async with asyncio.timeout(10.0):
            return await ended

    asyncio.run(run())
    assert child.poll() is None


# -- cells --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["tokens", "move", "active"]), st.integers(0, 1000)), max_size=30))
def test_a_cell_counts(tmp_path_factory: pytest.TempPathFactory, work: list[tuple[str, int]]) -> None:
    path = tmp_path_factory.getbasetemp() / "cell"
    cell = ProgressCell(path)
    tokens = moves = active = 0
    try:
        for kind, count in work:
            if kind == "tokens":
                cell.tokens(count)
                tokens, moves = tokens + count, moves + count
            elif kind == "move":
                cell.move(count)
                moves += count
            else:
                cell.active = active = count
        assert cell.read() == (tokens, moves, active, -1)
        assert cell.active == active
        assert ProgressCell.read_at(path).tokens == tokens
    finally:
        cell.close()
        path.unlink()
    assert ProgressCell.read_at(path).tokens == 0


def test_what_a_member_counted_outlives_its_sigkill(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "cells" / "rollout-1-3"
    code = (
        "import sys, pathlib; from robustrl.detect import ProgressCell\n"
        "cell = ProgressCell(pathlib.Path(sys.argv[1]))\n"
        "for n in range(1000): cell.tokens(3)\n"
        "cell.step = 7\n"
        "print('counted', flush=True)\n"
        "while True: cell.move()\n"
    )
    child = start(sys.executable, "-c", code, str(path))
    assert child.stdout is not None
    assert child.stdout.readline() == b"counted\n"
    child.kill()
    child.wait()
    counted = ProgressCell.read_at(path)
    assert (counted.tokens, counted.step) == (3000, 7)


def test_a_cell_that_is_cut_or_missing_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(b"\xff" * 10)
    assert ProgressCell.read_at(tmp_path / "cut").tokens == 0
    assert ProgressCell.read_at(tmp_path / "missing").tokens == 0
