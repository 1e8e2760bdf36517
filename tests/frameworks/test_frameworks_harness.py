"""The harness finds what jobs leave, and ends what they started. (These tests need no framework.)"""

from __future__ import annotations

import importlib.metadata
import signal
import sys
from pathlib import Path
from uuid import uuid4

import census
import environments
import pytest
from census import Proc
from installed import install_robustrl
from jobs import Job

ESCAPED = """
import os, subprocess, sys
subprocess.Popen(["sleep", "100"], start_new_session=True, close_fds=False)
print("escaped", flush=True)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_job_that_ends_well_leaves_nothing() -> None:
    with Job(python("print('hello')"), {}) as job:
        assert job.wait(20) == 0
        assert job.text() == "hello\n"
        assert job.leftovers() == []
    assert not job.folder.exists()


def test_a_signal_is_an_exit_code_as_a_shell_gives_it() -> None:
    with Job(["sleep", "100"], {}) as job:
        job.process.send_signal(signal.SIGKILL)
        assert job.wait(20) == 137


def test_a_process_that_went_its_own_way_is_found_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.SETTLE_S", 0.2)
    with Job(python(ESCAPED), {}) as job:
        assert job.wait(20) == 0
        (escaped,) = job.processes("^sleep")
        assert job.leftovers() == [f"process {escaped.pid} sleep 100"]
    assert not escaped.alive()


def test_shared_memory_that_nobody_uses_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.SETTLE_S", 0.2)
    name = f"robustrl-harness-{uuid4().hex}"
    code = f"open('/dev/shm/{name}', 'w').close()"
    try:
        with Job(python(code), {}) as job:
            assert job.wait(20) == 0
            assert f"shared memory {name}" in job.leftovers()
            with Path(f"/dev/shm/{name}").open():
                assert f"shared memory {name}" not in job.leftovers()
    finally:
        Path(f"/dev/shm/{name}").unlink(missing_ok=True)


def test_waiting_for_a_job_that_has_ended_does_not_take_long() -> None:
    with Job(python("raise SystemExit(3)"), {}) as job, pytest.raises(AssertionError, match="ended with 3"):
        job.until_said("never", 60)


def test_a_process_that_has_another_start_time_is_not_killed() -> None:
    with Job(["sleep", "100"], {}) as job:
        (found,) = job.until(lambda: job.processes("^sleep"), 20, "the process")
        Proc(found.pid, found.started - 1).kill()
        assert found.alive()
        assert census.proc(found.pid) == found


def test_robustrl_looks_installed(tmp_path: Path) -> None:
    install_robustrl(tmp_path)
    (found,) = importlib.metadata.distributions(name="robustrl", path=[str(tmp_path)])
    assert ("verl.plugins", "robustrl") in {(point.group, point.name) for point in found.entry_points}


@pytest.fixture
def requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "toy" / "requirements"
    folder.mkdir(parents=True)
    (folder / "torch.txt").write_text("torch==2.13.0\n")
    (folder / "light.txt").write_text("toy==1\n")
    monkeypatch.setattr(environments, "HERE", tmp_path)
    monkeypatch.setenv("ROBUSTRL_CACHE", str(tmp_path / "cache"))
    return folder


def test_another_pin_is_another_environment(requirements: Path) -> None:
    before = environments.environment_folder("toy", "light")
    assert environments.environment_folder("toy", "light") == before
    (requirements / "light.txt").write_text("toy==2\n")
    assert environments.environment_folder("toy", "light") != before


def test_an_environment_that_is_not_whole_is_built_again(requirements: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def build(target: Path, files: object) -> None:
        assert not target.exists()
        target.mkdir()
        built.append(target)
        if len(built) == 1:
            raise SystemExit("the network is away")

    monkeypatch.setattr(environments, "_build", build)
    with pytest.raises(SystemExit):
        environments.ensure("toy", "light")
    assert environments.ensure("toy", "light") == environments.ensure("toy", "light") == built[-1]
    assert len(built) == 2


def test_an_unknown_kind_is_refused(requirements: Path) -> None:
    with pytest.raises(SystemExit, match="there is no environment toy full"):
        environments.ensure("toy", "full")
