"""The main job, with real faults. Short runs of what `make demo` shows."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from robustrl.inject.schedule import random_schedule, to_text
from robustrl.report.leftovers import leftovers
from robustrl.report.summary import Summary, read_summary

TRANSPORTS = ("ucx", "shm", "tcp") if importlib.util.find_spec("ucxx") else ("shm", "tcp")
# A stopped rollout is found after two seconds: the job must go on for longer than that.
FIVE_FAULTS = (
    "kill rollout/1 at step 2; stop rollout/0 at step 4; kill trainer at step 9; kill manager at step 11; "
    "kill supervisor at step 13"
)


def _demo(report: Path, *args: str) -> Summary:
    done = subprocess.run(
        [sys.executable, "-m", "robustrl.cli", "demo", "--report", str(report), *args],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return read_summary(report / "summary.json")


def _is_whole(summary: Summary) -> None:
    assert summary.outcome == "finished"
    assert summary.lost_trajectories == 0
    assert summary.duplicated_trajectories == 0
    assert summary.bystander_restarts == 0
    assert summary.leftovers == {"processes": [], "ports": [], "shared_memory": []}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_role_is_lost_once_and_nothing_else_is(tmp_path: Path, transport: str) -> None:
    summary = _demo(tmp_path, "--steps", "16", "--faults", FIVE_FAULTS, "--transport", transport)
    _is_whole(summary)
    assert summary.transport == transport
    assert {(fault.kind, fault.member) for fault in summary.faults} == {
        ("kill", "rollout/1"),
        ("kill", "trainer/0"),
        ("stop", "rollout/0"),
        ("kill", "manager/0"),
        ("kill", "supervisor/0"),
    }
    assert len(summary.recoveries) == 5
    assert all(recovery.mttr_s is not None for recovery in summary.recoveries)
    assert summary.reward_first is not None
    assert summary.reward_last is not None
    assert summary.reward_last > summary.reward_first
    assert (tmp_path / "timeline.png").stat().st_size > 10_000


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    summary = _demo(tmp_path_factory.mktemp("undisturbed"), "--deterministic", "--no-faults", "--steps", "8")
    _is_whole(summary)
    return summary.final_digest


@pytest.mark.parametrize(
    "faults",
    [
        "kill trainer at step 2 after wait; kill rollout/1 at step 4; kill trainer at step 5 in train; "
        "stop rollout/0 at step 7",
        "kill trainer at step 2 in checkpoint; kill manager at step 4; kill supervisor at step 5; "
        "kill trainer at step 7 in sync",
        to_text(random_schedule(random.Random(11), steps=8, rollouts=3, faults=4)),
    ],
)
def test_a_deterministic_run_with_faults_ends_with_the_weights_of_one_without(
    tmp_path: Path, undisturbed: str, faults: str
) -> None:
    summary = _demo(tmp_path, "--deterministic", "--steps", "8", "--faults", faults)
    _is_whole(summary)
    assert len(summary.faults) == 4
    assert summary.final_digest == undisturbed


def test_restarting_the_whole_job_at_each_fault_finishes_too_and_loses_more_time(tmp_path: Path) -> None:
    faults = ("--steps", "6", "--faults", "kill rollout/0 at step 2; kill trainer at step 4")
    role = _demo(tmp_path / "role", *faults)
    whole = _demo(tmp_path / "whole", *faults, "--policy", "whole-job")
    _is_whole(role)
    assert whole.outcome == "finished"
    assert (whole.lost_trajectories, whole.duplicated_trajectories) == (0, 0)
    assert whole.bystander_restarts > 0
    assert whole.ettr_strict < role.ettr_strict


def _heed_interrupts() -> None:
    # Whoever runs the tests in the background of a shell has SIGINT ignored, and so would all that they start.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, how: signal.Signals) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "robustrl.cli", "demo", "--no-faults", "--report", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_heed_interrupts,  # noqa: PLW1509 - it takes no lock
    )
    try:
        deadline = time.monotonic() + 60
        while not any('"step_done"' in log.read_text() for log in tmp_path.glob("runs/*/events.jsonl")):
            assert demo.poll() is None
            assert time.monotonic() < deadline, "the job never made a step"
            time.sleep(0.05)
        demo.send_signal(how)
        assert demo.wait(30) != 0
    finally:
        if demo.poll() is None:
            demo.kill()
            demo.wait()
    (run,) = tmp_path.glob("runs/*")
    assert leftovers(os.fspath(run)) == {"processes": [], "ports": [], "shared_memory": []}
