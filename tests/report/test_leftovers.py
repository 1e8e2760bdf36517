from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from robustrl.detect.process import start_time
from robustrl.report import leftovers

NOTHING: dict[str, list[str]] = {"processes": [], "ports": [], "shared_memory": []}
SERVER = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
LIMIT_S = 10.0


def start(code: str, run_dir: Path | None = None) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name != "ROBUSTRL_RUN_DIR"}
    if run_dir is not None:
        env["ROBUSTRL_RUN_DIR"] = str(run_dir)
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_run_that_left_nothing_is_clean(tmp_path: Path) -> None:
    assert leftovers(tmp_path, [(1, 1)], [1], f"robustrl-{uuid.uuid4().hex}") == NOTHING


def test_a_process_with_the_runs_folder_in_its_environment_is_found_with_its_port(
    tmp_path: Path, children: list[subprocess.Popen[str]]
) -> None:
    children.append(start(SERVER + "time.sleep(60)", tmp_path))
    port = first_line(children[0])
    found = leftovers(tmp_path)
    assert found["ports"] == [port]
    (process,) = found["processes"]
    assert process.startswith(f"{children[0].pid} ")
    children[0].kill()
    children[0].wait()
    assert leftovers(tmp_path, ports=[int(port)]) == NOTHING


def test_a_spawned_process_is_known_by_pid_and_start_time(
    tmp_path: Path, children: list[subprocess.Popen[str]]
) -> None:
    children.append(start("import time; time.sleep(60)"))
    pid = children[0].pid
    assert len(leftovers(tmp_path, [(pid, start_time(pid))])["processes"]) == 1
    assert leftovers(tmp_path, [(pid, start_time(pid) - 1)]) == NOTHING


def test_a_process_that_ended_and_was_not_reaped_is_gone(tmp_path: Path, children: list[subprocess.Popen[str]]) -> None:
    children.append(start("pass", tmp_path))
    deadline = time.monotonic() + LIMIT_S
    while "Z" not in Path(f"/proc/{children[0].pid}/stat").read_text().rpartition(")")[2].split()[0]:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert leftovers(tmp_path) == NOTHING


def test_what_belongs_to_another_run_is_left_out(tmp_path: Path, children: list[subprocess.Popen[str]]) -> None:
    children.append(start(SERVER + "time.sleep(60)", tmp_path / "other"))
    port = int(first_line(children[0]))
    assert leftovers(tmp_path, ports=[port]) == NOTHING


def test_a_port_of_the_run_that_someone_still_listens_on_is_found(
    tmp_path: Path, children: list[subprocess.Popen[str]]
) -> None:
    children.append(start(SERVER + "time.sleep(60)"))
    port = first_line(children[0])
    assert leftovers(tmp_path, ports=[int(port)])["ports"] == [port]


def test_shared_memory_is_found_by_the_runs_prefix(tmp_path: Path) -> None:
    prefix = f"robustrl-test-{uuid.uuid4().hex[:12]}"
    segment = Path("/dev/shm") / f"{prefix}-weights"
    segment.write_bytes(b"x")
    try:
        assert leftovers(tmp_path, shm_prefix=prefix)["shared_memory"] == [segment.name]
    finally:
        segment.unlink()
    assert leftovers(tmp_path, shm_prefix=prefix) == NOTHING
