"""Virtual environments that hold a framework: one for each content of its requirement files, built once, kept.

    python tests/frameworks/environments.py verl light

prints the environment's folder, and builds it first where it is missing. Needs nothing but the standard library, since
it runs before there is anything else. The folder is ``$ROBUSTRL_CACHE/envs`` (default ``~/.cache/robustrl/envs``).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
PIP_LIMIT_S: Final = 1800.0


def cache_folder() -> Path:
    """Where what is expensive to make lies between runs, outside any clone."""
    return Path(os.environ.get("ROBUSTRL_CACHE", "~/.cache/robustrl")).expanduser()


def requirement_files(framework: str, kind: str) -> list[Path]:
    """torch's file, then the one that holds everything else, complete with what it needs in turn.

    Raises SystemExit where there is no such kind.
    """
    folder = HERE / framework / "requirements"
    files = [folder / "torch.txt", folder / f"{kind}.txt"]
    for file in files:
        if not file.exists():
            raise SystemExit(f"there is no environment {framework} {kind}: {file} is missing")
    return files


def environment_folder(framework: str, kind: str) -> Path:
    """The environment's place. Its name says what it holds: another Python or another pin is another folder."""
    digest = hashlib.sha256(f"{platform.python_implementation()} {sys.version} {platform.machine()}".encode())
    for file in requirement_files(framework, kind):
        digest.update(file.read_bytes())
    return cache_folder() / "envs" / f"{framework}-{kind}-{digest.hexdigest()[:12]}"


def ensure(framework: str, kind: str) -> Path:
    """The environment, built if it is not there whole. Two builders wait for each other."""
    target = environment_folder(framework, kind)
    complete = target / ".complete"
    target.parent.mkdir(parents=True, exist_ok=True)
    # A lock dies with its holder, so a builder that was killed stops nobody.
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            began = time.monotonic()
            print(f"building {target}", file=sys.stderr, flush=True)
            shutil.rmtree(target, ignore_errors=True)  # an environment cannot be moved, so it is built in its place
            _build(target, requirement_files(framework, kind))
            complete.write_text(f"{time.monotonic() - began:.0f} s\n")
    return target


def _build(target: Path, files: Sequence[Path]) -> None:
    venv.create(target, with_pip=True, symlinks=True)
    # Every file is complete, so nothing is resolved, and nothing can bring another torch.
    _pip(target, "install", "--no-deps", "-r", str(files[0]))
    build = _python(target, "-c", "from importlib.metadata import version; print(version('torch'))").strip()
    if not build.endswith("+cpu"):
        raise SystemExit(f"pip found torch {build}, and the tests need the CPU build: add its index to pip's settings")
    _pip(target, "install", "--no-deps", *(word for file in files[1:] for word in ("-r", str(file))))


def _pip(target: Path, *words: str) -> None:
    _python(target, "-m", "pip", *words, "-qq", "--disable-pip-version-check", "--no-warn-script-location")


def _python(target: Path, *words: str) -> str:
    command = [str(target / "bin" / "python"), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PIP_LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {done.returncode}; the environment {target} is not whole")
    return done.stdout


if __name__ == "__main__":
    print(ensure(*sys.argv[1:3]))
