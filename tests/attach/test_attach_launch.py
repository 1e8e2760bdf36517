"""``robustrl run``, with a small framework of our own and its adapter, in real processes."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FRAMEWORK = """
import json, os, signal, sys, time
from tinyframe import core

def main():
    seen = {"argv": sys.argv[1:], "name": __name__, "answer": core.answer(1), "loaded": os.environ.get("TINY")}
    print(json.dumps(seen))
    sys.stdout.flush()
    if "wait" in sys.argv:
        def stop(number, frame):
            print("stopping", flush=True)
            sys.exit(7)
        signal.signal(signal.SIGTERM, stop)
        print("ready", flush=True)
        time.sleep(60)
    if "die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    if "raise" in sys.argv:
        raise RuntimeError("the framework's own trouble")
    if "give-up" in sys.argv:
        from robustrl.attach import Session
        from robustrl.errors import JobFailedError
        from robustrl.events import JobEnded
        Session.current().events("trainer/0#1").emit(JobEnded(outcome="failed", cause="rollout/1#1 was killed"))
        raise JobFailedError("the job was given up", why="rollout/1#1 was killed")

if __name__ == "__main__":
    main()
"""

ADAPTER = """
import importlib, os, sys
from robustrl.attach import after_import, assert_applied, wrap

def environment():
    return {"TINY": "yes"}

def install():
    if not os.environ.get("TINY_LAZY"):
        after_import("tinyframe.core", lambda m: wrap(m, "answer", lambda wrapped, x: -wrapped(x), expect="x"))

def entry(module, argv):
    sys.argv = [module, *argv]
    found = importlib.import_module(module)
    assert_applied(["tinyframe.core:answer"])
    return found.main
"""


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, str]:
    """The environment in which ``tinyframe`` and its adapter are installed."""
    site = tmp_path / "site"
    package = site / "tinyframe"
    info = site / "tinyframe-3.2.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text("def answer(x):\n    return 41 + x\n")
    (package / "main.py").write_text(textwrap.dedent(FRAMEWORK))
    (site / "tiny_adapter.py").write_text(textwrap.dedent(ADAPTER))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tinyframe\nVersion: 3.2\n")
    (info / "entry_points.txt").write_text("[robustrl.adapters]\ntinyframe = tiny_adapter\n")
    return os.environ | {"PYTHONPATH": str(site)}


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tiny: dict[str, str], tmp_path: Path) -> Run:
    def go(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "robustrl.cli", "run", "--", *words]
        return subprocess.run(
            command, env=tiny | env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    return go


def said(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    return found


def test_the_framework_runs_patched_and_sees_none_of_our_flags(run: Run, tmp_path: Path) -> None:
    done = run(
        sys.executable, "-u", "-m", "tinyframe.main", "a=1", "robustrl.restart.budget=5", "robustrl.run=here", "--b"
    )
    assert done.returncode == 0, done.stderr
    assert said(done) == {"argv": ["a=1", "--b"], "name": "tinyframe.main", "answer": -42, "loaded": "yes"}
    secret = tmp_path / "here" / "secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert secret.read_text() not in done.stdout + done.stderr


def test_switched_off_it_is_the_framework_alone(run: Run, tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "tinyframe.main", "a=1", "robustrl.enable=false", "robustrl.run=here")
    assert done.returncode == 0, done.stderr
    assert said(done) == {"argv": ["a=1"], "name": "__main__", "answer": 42, "loaded": None}
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-m", "tinyframe.main"], "runs a module"),
        (["python", "tinyframe/main.py"], "runs a module"),
        (["python", "-m", "tinyframe.main", "robustrl.restart.bugdet=1"], "Did you mean robustrl.restart.budget?"),
        (["python", "-m", "otherframe.main"], "no adapter for 'otherframe'"),
        (["/nowhere/python", "-m", "tinyframe.main"], "cannot start /nowhere/python"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(run: Run, words: list[str], text: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_used_run_folder_is_refused(run: Run) -> None:
    command = (sys.executable, "-m", "tinyframe.main", "robustrl.run=here")
    assert run(*command).returncode == 0
    again = run(*command)
    assert again.returncode == 2
    assert "has been used" in again.stderr


def test_patches_that_are_missing_end_it_before_the_framework_begins(run: Run) -> None:
    done = run(sys.executable, "-m", "tinyframe.main", TINY_LAZY="1")
    assert done.returncode == 2
    assert "not patched in this process: tinyframe.core:answer" in done.stderr
    assert done.stdout == ""


def test_a_framework_that_has_moved_ends_it_before_it_begins(run: Run, tiny: dict[str, str]) -> None:
    Path(tiny["PYTHONPATH"], "tinyframe", "core.py").write_text("def answer(x, y=0):\n    return 41 + x\n")
    done = run(sys.executable, "-m", "tinyframe.main")
    assert done.returncode == 2
    assert "tinyframe 3.2 has moved: tinyframe.core:answer was expected as (x), and is (x, y=0)" in done.stderr
    assert done.stdout == ""


def test_exit_codes_and_first_causes_come_through(run: Run) -> None:
    assert run(sys.executable, "-m", "tinyframe.main", "die").returncode == 128 + signal.SIGKILL
    own = run(sys.executable, "-m", "tinyframe.main", "raise")
    assert own.returncode == 1
    assert "the framework's own trouble" in own.stderr
    given_up = run(sys.executable, "-m", "tinyframe.main", "give-up")
    assert given_up.returncode == 1
    assert "the job was given up: rollout/1#1 was killed" in given_up.stderr


@pytest.mark.parametrize("how", ["passed on", "launcher killed"])
def test_the_framework_ends_with_its_launcher(tiny: dict[str, str], tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-m", "robustrl.cli", "run", "--", sys.executable, "-m", "tinyframe.main", "wait"]
    with subprocess.Popen(command, env=tiny, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        while "ready" not in launcher.stdout.readline():
            pass
        launcher.send_signal(signal.SIGTERM if how == "passed on" else signal.SIGKILL)
        # The pipe ends when the framework's process does.
        assert launcher.stdout.read().split() == ["stopping"]
    assert launcher.returncode == (7 if how == "passed on" else -signal.SIGKILL)
