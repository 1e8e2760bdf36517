"""``robustrl run -- python -m MODULE ARGS``: the framework's own command, with the adapter in it.

The command runs as a child. Signals are passed on to it, its exit code is ours, and what is wrong with our flags is
said before anything of it starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from robustrl.attach.adapter import find_adapter
from robustrl.attach.flags import extract
from robustrl.attach.session import Session
from robustrl.errors import AttachError, ConfigError
from robustrl.events import JobEnded, of_kind, read_events
from robustrl.wire import Secret

PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Command(NamedTuple):
    """``python [options] -m module args``."""

    interpreter: tuple[str, ...]
    module: str
    args: tuple[str, ...]


def read_command(words: Sequence[str]) -> Command:
    """Takes a command apart. Raises ConfigError for one that does not run a module by name."""
    words = list(words)
    if "-m" not in words[:-1] or words[0].startswith("-"):
        raise ConfigError(
            "robustrl run needs a command that runs a module",
            why=f"it is {' '.join(words) or 'empty'!r}",
            do="Write robustrl run -- python -m MODULE ARGS; a loop of your own is attached with robustrl.guard.",
        )
    at = words.index("-m")
    return Command(tuple(words[:at]), words[at + 1], tuple(words[at + 2 :]))


def launch(words: Sequence[str]) -> int:
    """Runs a framework's command attached. Returns its exit code; 128 + n where signal n ended it.

    Raises:
        ConfigError: the command or a flag of ours is wrong, or there is no adapter; nothing was started.
    """
    command = read_command(words)
    flags = extract(command.args)
    if not flags.enable:
        return _run([*command.interpreter, "-m", command.module, *flags.rest], dict(os.environ))
    package = command.module.partition(".")[0]
    adapter = find_adapter(package)
    folder = Path(flags.run or f"robustrl-runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()
    session = Session(package, str(folder), flags.config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if session.secret_path.exists():
            raise ConfigError(f"the run folder {folder} has been used", do="Give each run a folder of its own.")
        Secret.create(session.secret_path)
    except OSError as error:
        raise ConfigError(f"cannot make the run folder {folder}", why=str(error)) from error
    env = os.environ | adapter.environment() | session.environment()
    code = _run([*command.interpreter, "-m", "robustrl.attach.child", command.module, *flags.rest], env)
    if code:
        _say_cause(folder)
    return code


def _run(command: list[str], env: dict[str, str]) -> int:
    try:
        child = subprocess.Popen(command, env=env, process_group=0)
    except OSError as error:
        raise AttachError(f"cannot start {command[0]}", why=str(error)) from error

    def pass_on(number: int, frame: object) -> None:
        if child.returncode is None:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _say_cause(folder: Path) -> None:
    path = folder / "events.jsonl"
    ended = list(of_kind(read_events(path), JobEnded)) if path.exists() else []
    cause = next((event.cause for event in ended if event.cause), "")
    if cause:
        print(f"robustrl: the job was given up: {cause}", file=sys.stderr)
    print(f"robustrl: the run's record is in {folder}", file=sys.stderr)
