"""What a scenario asks of its members, and the few things that they do alike.

The script of a scenario travels in one environment variable. While the job runs, a test steers it with gates: files in
the run's folder that members look for.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import xxhash

VARIABLE = "SCENARIO_SCRIPT"
LEDGER_FILE = "ledger.db"
POLL_S = 0.02
"""How often a member looks at a gate."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the job, and who misbehaves how. Members are written ``rollout/1``."""

    groups: int = 4
    """Prompts of one step."""
    samples: int = 2
    steps: int = 2
    tokens: int = 6
    """Length of an answer."""
    long_from: int | None = None
    """From this prompt on, answers are `long_tokens` long."""
    long_tokens: int = 100
    token_s: float = 0.05
    """What the fake engine takes for a token of each open sample."""
    trainer_stops_after: int | None = None
    """The trainer's own limit of steps, below the job's: it leaves its loop there once the gate ``stop`` opens."""
    hold_from: int | None = None
    """From this prompt on, rollouts stand still in phase ``tool`` until the gate ``go`` opens."""
    exits_with_0: str = ""
    """This rollout's first life ends with ``os._exit(0)`` once tokens of its first lease are saved."""
    leaves_early: tuple[str, ...] = ()
    """These rollouts leave their loop, and their guard in order, once tokens of their first lease are saved."""
    background_fails: bool = False
    """At the gate ``fault`` a background task of each rollout's engine raises."""
    failures: int = 0
    """In each round each rollout fails this many leases with an infrastructure failure, then finishes one, which
    waits until the ledger has all failures of the round."""
    rounds: int = 1
    rollouts: int = 3

    def length(self, group: int) -> int:
        return self.long_tokens if self.long_from is not None and group >= self.long_from else self.tokens

    def env(self) -> dict[str, str]:
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_env(cls) -> Script:
        return msgspec.json.decode(os.environ[VARIABLE], type=cls)


def token(group: int, sample: int, place: int) -> int:
    """The fake engine's next token: a hash of the prompt and the place, whoever computes it."""
    return xxhash.xxh32_intdigest(f"{group}/{sample}/{place}".encode()) & 0x7FFFFFFF


def answer(group: int, sample: int, length: int) -> list[int]:
    return [token(group, sample, place) for place in range(length)]


def run_dir() -> Path:
    return Path(os.environ["ROBUSTRL_RUN_DIR"])


def gate(folder: Path, name: str) -> Path:
    return folder / f"gate-{name}"


def tell(folder: Path, who: str, **what: Any) -> None:
    """One line in the member's own report, which is no part of robustrl."""
    line = msgspec.json.encode({"who": who, "pid": os.getpid(), **what}) + b"\n"
    fd = os.open(folder / "told.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


def ledger_rows(folder: Path, sql: str, params: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
    """Looks into the ledger's file from outside; empty while there is none."""
    path = folder / LEDGER_FILE
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=2.0)) as database:
            return database.execute(sql, tuple(params)).fetchall()
    except sqlite3.OperationalError:  # not there yet, or its tables are just being made
        return []


def saved_tokens(folder: Path, group: int) -> int:
    return int(
        ledger_rows(folder, "SELECT coalesce(sum(length(ids)), 0) / 4 FROM segments WHERE grp = ?", [group])[0][0]
    )


def recorded_failures(folder: Path) -> int:
    rows = ledger_rows(folder, "SELECT count(*) FROM attempts WHERE outcome LIKE 'failed%'")
    return int(rows[0][0]) if rows else 0
