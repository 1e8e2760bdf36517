from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from robustrl.events import FaultInjected, PhaseEntered, of_kind, read_events
from robustrl.inject import parse
from robustrl.inject.member import Trap

LOOP = """
import sys, time
from pathlib import Path
from robustrl.events import EventLog, PhaseEntered

incarnation = int(sys.argv[1])
log = EventLog(Path(sys.argv[2]) / "events.jsonl", by=f"trainer/0#{incarnation}")
for step in (1, 2, 3):
    for phase in ("wait", "train", "checkpoint", "sync"):
        log.emit(PhaseEntered(member="trainer/0", incarnation=incarnation, phase=phase, step=step))
        time.sleep(0.5 if (phase, step) == ("train", 2) else 0.02)
        (Path(sys.argv[2]) / "work").open("a").write(f"{phase} {step}\\n")
"""


def run(tmp_path: Path, faults: str, incarnation: int = 1) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    env = os.environ | {"ROBUSTRL_FAULTS": faults, "ROBUSTRL_RUN_DIR": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-m", "robustrl.inject.member", str(script), str(incarnation), str(tmp_path)],
        env=env,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )


def worked(tmp_path: Path) -> list[str]:
    return (tmp_path / "work").read_text().splitlines()


@pytest.mark.parametrize(
    ("when", "entered", "last_work"),
    [
        ("before train", "train 2", "wait 2"),
        ("in train", "train 2", "wait 2"),
        ("after train", "checkpoint 2", "train 2"),
        ("after generate", "train 2", "wait 2"),
        ("after sync", "wait 3", "sync 2"),
    ],
)
def test_a_member_ends_itself_at_the_exact_boundary(tmp_path: Path, when: str, entered: str, last_work: str) -> None:
    ended = run(tmp_path, f"kill rollout/0 at step 1 in train; kill trainer at step 2 {when}; kill trainer at step 1")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    events = read_events(tmp_path / "events.jsonl")
    (fault,) = of_kind(events, FaultInjected)
    assert (fault.kind, fault.member, fault.incarnation, fault.step, fault.phase) == ("kill", "trainer/0", 1, 2, when)
    last = list(of_kind(events, PhaseEntered))[-1]
    assert f"{last.phase} {last.step}" == entered
    assert worked(tmp_path)[-1] == last_work


def test_a_member_that_comes_back_passes_the_place_unharmed(tmp_path: Path) -> None:
    faults = "kill trainer at step 2 before sync"
    assert run(tmp_path, faults).returncode == -signal.SIGKILL
    again = run(tmp_path, faults, incarnation=2)
    assert again.returncode == 0, again.stderr
    assert worked(tmp_path)[-1] == "sync 3"
    assert len(list(of_kind(read_events(tmp_path / "events.jsonl"), FaultInjected))) == 1


def test_a_delay_longer_than_the_phase_strikes_at_its_end(tmp_path: Path) -> None:
    assert run(tmp_path, "term trainer at step 2 in train +30s").returncode == -signal.SIGTERM
    assert worked(tmp_path)[-1] == "train 2"


def test_without_faults_the_script_runs_as_ever(tmp_path: Path) -> None:
    ended = run(tmp_path, "")
    assert ended.returncode == 0, ended.stderr
    assert len(worked(tmp_path)) == 12
    assert not (tmp_path / "faults").exists()


def test_a_trap_hears_only_its_own_member_and_step() -> None:
    (fault,) = parse("kill trainer at step 2 after train")
    trap = Trap(fault)
    heard = [
        trap.heard(PhaseEntered(member=member, incarnation=1, phase=phase, step=step))
        for member, phase, step in (
            ("trainer/0", "train", 1),
            ("trainer/0", "sync", 1),
            ("trainer/0", "train", 2),
            ("rollout/0", "sync", 2),
            ("trainer/0", "sync", 2),
        )
    ]
    assert heard == ["", "", "", "", "now"]
