"""What the supervisor must not forget, in SQLite: its successor after a kill knows the same."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TypeVar

import msgspec

from robustrl.restart.membership import MemberRecord
from robustrl.restart.plan import Loss

T = TypeVar("T")


class JobState(msgspec.Struct, frozen=True):
    outcome: str = ""
    """Empty while the job runs; ``finished`` or ``failed`` from the decision on."""
    cause: str = ""
    job_restarts: tuple[float, ...] = ()


class Journal:
    """Keeps records, losses and the job's state. One writer; each call is durable against a kill when it returns."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, value BLOB NOT NULL)")
        self._db.execute("CREATE TABLE IF NOT EXISTS losses (number INTEGER PRIMARY KEY, value BLOB NOT NULL)")

    def put_record(self, record: MemberRecord) -> None:
        self._put(f"member:{record.member}", record)

    def records(self) -> list[MemberRecord]:
        rows = self._db.execute("SELECT value FROM state WHERE key LIKE 'member:%' ORDER BY key").fetchall()
        return [msgspec.json.decode(value, type=MemberRecord) for (value,) in rows]

    def put_job(self, job: JobState) -> None:
        self._put("job", job)

    def job(self) -> JobState:
        row = self._db.execute("SELECT value FROM state WHERE key = 'job'").fetchone()
        return msgspec.json.decode(row[0], type=JobState) if row else JobState()

    def put_losses(self, losses: list[Loss]) -> None:
        with self._db:
            self._db.execute("BEGIN")
            self._db.executemany(
                "INSERT OR REPLACE INTO losses VALUES (?, ?)",
                [(number, msgspec.json.encode(loss)) for number, loss in enumerate(losses)],
            )

    def losses(self) -> list[Loss]:
        rows = self._db.execute("SELECT value FROM losses ORDER BY number").fetchall()
        return [msgspec.json.decode(value, type=Loss) for (value,) in rows]

    def close(self) -> None:
        self._db.close()

    def _put(self, key: str, value: object) -> None:
        self._db.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (key, msgspec.json.encode(value)))
