"""Wrong input to `robustrl demo` ends at once, with one message and exit code 2, and starts nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from robustrl import wire
from robustrl.demo import DemoOptions, check_options
from robustrl.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (DemoOptions(faults="kill banana at step 3"), "unknown role 'banana'"),
        (DemoOptions(faults="kill rollout/7 at step 3"), "no rollout/7"),
        (DemoOptions(faults="kill trainer at step 99"), "outside the run"),
        (DemoOptions(faults="explode trainer"), "cannot read the fault"),
        (DemoOptions(steps=0), "--steps"),
        (DemoOptions(rollouts=0), "--rollouts"),
        (DemoOptions(staleness=-1), "persist.staleness"),
        (DemoOptions(report=Path("/proc/nowhere")), "report folder"),
        (DemoOptions(deterministic=True, policy="whole-job"), "contradict"),
    ],
)
def test_options_that_cannot_be_run_are_refused_with_the_reason(
    options: DemoOptions, said: str, tmp_path: Path
) -> None:
    if options.report == Path("report"):
        import msgspec

        options = msgspec.structs.replace(options, report=tmp_path)
    with pytest.raises(ConfigError, match=said):
        check_options(options)


def _demo(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "robustrl.cli", "demo", *args], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_wrong_fault_ends_the_command_with_one_line_and_code_2(tmp_path: Path) -> None:
    begun = time.monotonic()
    done = _demo("--faults", "kill banana at step 3", "--report", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "banana" in done.stderr
    assert done.stdout == ""
    assert time.monotonic() - begun < 30
    assert not (tmp_path / "runs").exists()


def test_a_port_in_use_ends_the_command_with_code_2(tmp_path: Path) -> None:
    taken = wire.bind()
    try:
        done = _demo("--no-faults", "--port", str(taken.getsockname()[1]), "--report", str(tmp_path))
    finally:
        taken.close()
    assert done.returncode == 2
    assert "in use" in done.stderr


def test_contradicting_flags_end_the_command_with_code_2(tmp_path: Path) -> None:
    done = _demo("--no-faults", "--faults", "kill trainer at step 2", "--report", str(tmp_path))
    assert done.returncode == 2
    assert "contradict" in done.stderr
