"""The ledger's tables: SQLite in WAL mode behind a small interface.

Writes are collected in memory and go to the file in one short transaction at `flush` (group commit); the caller
acknowledges after that. What this promises:

- *A killed process* (SIGKILL at any instant): everything flushed is there. A transaction's frames are in the kernel
  when COMMIT returns, and half a transaction is not seen by the next reader.
- *Power loss or a kernel crash*: with synchronous=NORMAL the newest flushes may be missing, whole ones, in order; the
  file stays consistent. `flush(sync=True)` (a committed step) waits for the disk, so what a power loss takes is
  tokens and batches since the last durable point, from which the trainer restarts anyway.

There is one writer. Opening the store takes the writer's number; a writer that lost it is refused at its next flush.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

from robustrl.errors import LedgerError, StorageError, WriterFencedError
from robustrl.persist.schema import APPLICATION_ID, SCHEMA_VERSION, TABLES, Value, checksum, create, migrate

BUSY_S: Final = 5.0


def cut_bytes(path: Path) -> int:
    """How many bytes at the end of a database's write-ahead log are the beginning of a frame and not all of it.

    A killed process leaves whole frames: only a disk, or who copied the file, cuts one. SQLite leaves it out, and with
    it the transaction that it belongs to. (The file's format: https://www.sqlite.org/fileformat2.html#walformat)
    """
    log = path.with_name(path.name + "-wal")
    try:
        size = log.stat().st_size
        with log.open("rb") as file:
            head = file.read(12)
    except OSError:
        return 0
    page = int.from_bytes(head[8:12], "big")
    return (size - 32) % (page + 24) if size > 32 and page else 0


class Rows:
    """Reads a ledger file. Rows whose checksum is wrong are left out and noted."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.damaged: list[tuple[str, tuple[Value, ...]]] = []
        """(table, key) of rows whose checksum did not match when they were read."""
        self._database: sqlite3.Connection | None = None

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Opens a ledger for reading, whoever else has it open. Raises LedgerError where there is none."""
        rows = cls(path)
        if not rows.path.is_file():
            raise LedgerError(f"there is no ledger at {rows.path}")
        try:
            rows._database = sqlite3.connect(f"{rows.path.resolve().as_uri()}?mode=ro", timeout=BUSY_S, uri=True)
            (application,) = rows._database.execute("PRAGMA application_id").fetchone()
            (version,) = rows._database.execute("PRAGMA user_version").fetchone()
        except sqlite3.Error as error:
            rows.close()
            raise LedgerError(f"cannot read the ledger {rows.path}", why=str(error)) from error
        if application != APPLICATION_ID or version != SCHEMA_VERSION:
            rows.close()
            raise LedgerError(
                f"cannot read {rows.path}",
                why="it is a database of something else"
                if application != APPLICATION_ID
                else f"it has schema {version}, this robustrl reads {SCHEMA_VERSION}",
                do="A job that goes on with the ledger brings it to the schema of its robustrl.",
            )
        return rows

    def rows(self, table: str, where: str = "1", *params: Value) -> Iterator[tuple[Any, ...]]:
        """Flushed rows in the order of their key. A row with a wrong checksum is left out and noted in `damaged`."""
        spec = TABLES[table]
        order = ", ".join(spec.columns[: spec.keys])
        try:
            for *row, total in self._connection().execute(
                f"SELECT * FROM {table} WHERE {where} ORDER BY {order}", params
            ):
                if total == checksum(table, row):
                    yield tuple(row)
                else:
                    self.damaged.append((table, tuple(row[: spec.keys])))
        except sqlite3.Error as error:
            raise StorageError(f"the ledger {self.path} cannot be read", why=str(error)) from error

    def close(self) -> None:
        """Flushes nothing: what was not flushed was not acknowledged."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _connection(self) -> sqlite3.Connection:
        if self._database is None:
            raise StorageError(f"the ledger {self.path} is closed")
        return self._database


class Store(Rows):
    """The one writer of a ledger file.

    Args:
        path: the database; made with its folder when missing.

    Raises:
        LedgerError: it cannot be opened, is not a ledger, or was written by a newer robustrl.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.cut = cut_bytes(self.path)
        """Bytes of a transaction that was cut off in the file's journal and is left out."""
        self._pending: dict[tuple[Any, ...], tuple[str, tuple[Value, ...]]] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # The ledger serialises its calls; which thread they come from is its business.
            self._database = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            self.writer = self._open(self._database)
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise LedgerError(f"cannot open the ledger {self.path}", why=str(error)) from error
        except LedgerError:
            self.close()
            raise

    def _open(self, database: sqlite3.Connection) -> int:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute("BEGIN IMMEDIATE")
        (application,) = database.execute("PRAGMA application_id").fetchone()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and application != APPLICATION_ID:
            raise LedgerError(f"{self.path} is a database of something else", do="Give the ledger a file of its own.")
        if version > SCHEMA_VERSION:
            raise LedgerError(
                f"the ledger {self.path} has schema {version}",
                why=f"this robustrl reads up to {SCHEMA_VERSION}",
                do="Use the robustrl that wrote it, or a newer one.",
            )
        if tables and version < SCHEMA_VERSION:
            migrate(database, version)
        for name in TABLES:
            create(database, name)
        database.execute(f"PRAGMA application_id={APPLICATION_ID}")
        database.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        found = database.execute("SELECT value FROM meta WHERE name = 'writer'").fetchone()
        writer = int(found[0]) + 1 if found else 1
        database.execute("REPLACE INTO meta VALUES (?, ?, ?)", ("writer", writer, checksum("meta", ("writer", writer))))
        database.execute("COMMIT")
        return writer

    # -- writing ---------------------------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        return bool(self._pending)

    def put(self, table: str, *row: Value) -> None:
        """Inserts or replaces a row at the next flush. A row that is put twice is written once."""
        spec = TABLES[table]
        marks = ", ".join("?" * (len(spec.columns) + 1))
        self._later((table, *row[: spec.keys]), f"REPLACE INTO {table} VALUES ({marks})", (*row, checksum(table, row)))

    def delete(self, table: str, *key: Value) -> None:
        """Deletes the rows whose leading key columns are `key`, at the next flush."""
        where = " AND ".join(f"{column} = ?" for column in TABLES[table].columns[: len(key)])
        self._later(("delete", table, *key), f"DELETE FROM {table} WHERE {where}", key)

    def _later(self, key: tuple[Any, ...], sql: str, params: tuple[Value, ...]) -> None:
        self._pending.pop(key, None)  # so that the newest word is the last: order between put and delete matters
        self._pending[key] = (sql, params)

    def flush(self, *, sync: bool = False) -> None:
        """Writes everything that is pending in one transaction; with `sync` it is on the disk when this returns.

        Raises:
            WriterFencedError: another process opened this store for writing; this one must end.
            StorageError: the write failed (a full disk); the file holds what it held before, nothing is pending.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        database = self._connection()
        try:
            if sync:
                database.execute("PRAGMA synchronous=FULL")
            database.execute("BEGIN IMMEDIATE")
            (writer,) = database.execute("SELECT value FROM meta WHERE name = 'writer'").fetchone()
            if writer != self.writer:
                raise WriterFencedError(
                    f"another process writes the ledger {self.path}", why=f"it is writer {writer}, we are {self.writer}"
                )
            for sql, params in pending.values():
                database.execute(sql, params)
            database.execute("COMMIT")
        except sqlite3.Error as error:
            raise StorageError(
                f"the ledger {self.path} cannot be written", why=str(error), do="Is the disk full?"
            ) from error
        finally:
            try:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                if sync:
                    database.execute("PRAGMA synchronous=NORMAL")
            except sqlite3.Error:
                pass  # SQLite rolled back by itself; the first error is the one to tell

    def forget_pending(self) -> None:
        self._pending.clear()

    def delete_below(self, table: str, group: int) -> None:
        """Deletes the rows of all groups under this one, at the next flush."""
        self._later(("below", table), f"DELETE FROM {table} WHERE grp < ?", (group,))

    def value(self, name: str, default: Any) -> Any:
        """What `meta` holds under this name, flushed or pending."""
        pending = self._pending.get(("meta", name))
        if pending is not None:
            return pending[1][1]
        return next((value for _, value in self.rows("meta", "name = ?", name)), default)
