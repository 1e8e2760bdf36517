"""The tables of a ledger file, what they were in older versions, and the checksum of a row."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import xxhash

SCHEMA_VERSION: Final = 2
APPLICATION_ID: Final = 0x526F4C67

Value = int | float | str | bytes | None


class Table(NamedTuple):
    columns: tuple[str, ...]
    keys: int
    """How many leading columns are the key."""


TABLES: Final = {
    "meta": Table(("name", "value"), 1),
    # A group's prompt, the newest lease on it, and the call that asked for that lease (for repeated calls).
    "groups": Table(("grp", "prompt", "attempt", "owner", "request", "barren"), 1),
    # Each lease there ever was, and how it ended.
    "attempts": Table(("grp", "attempt", "owner", "leased_at", "saved_tokens", "outcome", "detail"), 2),
    "samples": Table(("grp", "sample", "state", "attempt", "owner", "reward", "finish_reason", "step", "failure"), 2),
    "segments": Table(
        ("grp", "sample", "start", "ids", "logprobs", "version", "owner", "trained", "sampling", "state"), 3
    ),
    # What a step consumed, and the first group after it.
    "consumption": Table(("step", "trainer", "trajectories", "after"), 1),
    # The lowest incarnation of a member that is listened to.
    "fences": Table(("member", "incarnation"), 1),
    # Tokens that an identity delivered, ever.
    "owners": Table(("owner", "tokens"), 1),
}

_encode = msgspec.msgpack.Encoder().encode


def create(database: sqlite3.Connection, name: str) -> None:
    """Creates a table as it is today, if it is not there."""
    table = TABLES[name]
    columns = ", ".join((*table.columns, "sum INTEGER NOT NULL"))
    key = ", ".join(table.columns[: table.keys])
    database.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns}, PRIMARY KEY ({key}))")


def migrate(database: sqlite3.Connection, version: int) -> None:
    """Brings the tables of an older schema to today's, inside the caller's transaction.

    A row that was damaged stays so: its checksum is wrong before and after.
    """
    if version == 1:
        (batch,) = database.execute("SELECT value FROM meta WHERE name = 'groups_per_batch'").fetchone() or (0,)
        added: dict[str, Callable[[Sequence[Value]], tuple[Value, ...]]] = {
            "groups": lambda row: (0,),
            "segments": lambda row: (1, "", b""),
            "consumption": lambda row: (int(row[0] or 0) * batch,),
        }
        for name, more in added.items():
            rows = database.execute(f"SELECT * FROM {name}").fetchall()
            database.execute(f"DROP TABLE {name}")
            create(database, name)
            for *row, total in rows:
                whole = (*row, *more(row))
                right = checksum(name, whole)
                values = (*whole, right if total == checksum(name, row) else right ^ 1)
                database.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(values))})", values)


def checksum(table: str, row: Sequence[Value]) -> int:
    """xxh3 of a row as a signed 64-bit number, which is what an SQLite integer holds."""
    return int(xxhash.xxh3_64_intdigest(_encode([table, *row]))) - (1 << 63)
