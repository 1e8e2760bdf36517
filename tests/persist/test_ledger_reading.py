"""Looking at a ledger file: counts, checks, exports, older schemas, compaction."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from test_ledger_core import TRAINER, Bench, rollout

from robustrl.errors import LedgerError
from robustrl.persist import reading
from robustrl.persist.schema import TABLES, checksum


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "robustrl.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Step 1 committed, step 2 consumed, and two groups under way."""
    bench = Bench(tmp_path / "ledger.db")
    for step in (1, 2):
        bench.run_step(step)
    bench.ledger.commit(TRAINER, 1)
    bench.append(rollout(1), bench.lease(rollout(1), 1), 0, 0, [5, 6, 7])
    grant = bench.lease(rollout(2), 1)
    bench.ledger.fail(rollout(2), grant.group, None, attempt=grant.attempt, kind="engine", detail="gone")
    return bench


def test_the_counts_of_a_ledger_that_is_in_use(bench: Bench) -> None:
    found = reading.summarize(bench.path)
    assert found.states == {"committed": 4, "consumed": 4, "failed": 2, "leased": 2}
    assert (found.groups, found.tokens, found.consumed, found.committed) == (6, 19, 2, 1)
    assert found.owners == {"rollout/0#1": 16, "rollout/1#1": 3}
    assert found.failures == {"failed: engine": 1}
    shown = cli("ledger", "show", bench.path.parent)
    assert shown.returncode == 0, shown.stderr
    assert "committed  " in shown.stdout
    assert "up to step 2" in shown.stdout
    assert "16 tokens" in shown.stdout


def test_a_whole_ledger_verifies_and_a_damaged_row_is_named(bench: Bench) -> None:
    assert reading.verify(bench.path) == []
    assert cli("ledger", "verify", bench.path).returncode == 0
    bench.store.close()
    with sqlite3.connect(bench.path) as database:
        database.execute("UPDATE segments SET ids = zeroblob(8) WHERE grp = 1 AND sample = 0")
    database.close()
    verified = cli("ledger", "verify", bench.path)
    assert verified.returncode == 1
    assert "a row of segments is damaged: grp 1, sample 0, start 0" in verified.stdout
    assert "trajectory 1/0 is committed and has no tokens" in verified.stdout


def rewrite(path: Path, table: str, where: str, column: str, value: object) -> None:
    """Changes a row as a bug would: with the right checksum."""
    columns = TABLES[table].columns
    database = sqlite3.connect(path)
    for *row, _ in database.execute(f"SELECT * FROM {table} WHERE {where}").fetchall():
        row[columns.index(column)] = value
        marks = ", ".join("?" * (len(row) + 1))
        database.execute(f"REPLACE INTO {table} VALUES ({marks})", (*row, checksum(table, row)))
    database.commit()
    database.close()


def test_tokens_that_are_missing_and_trajectories_in_the_wrong_state_are_found(bench: Bench) -> None:
    bench.store.close()
    rewrite(bench.path, "samples", "grp = 0 AND sample = 1", "state", "issued")
    rewrite(bench.path, "samples", "grp = 5 AND sample = 1", "state", "committed")
    database = sqlite3.connect(bench.path)
    database.execute("UPDATE segments SET start = 1 WHERE grp = 2 AND sample = 0")
    database.commit()
    database.close()
    rewrite(bench.path, "segments", "grp = 2 AND sample = 0", "start", 1)
    assert reading.verify(bench.path) == [
        "trajectory 2/0: tokens 0 to 1 are missing",
        "trajectory 0/1 belongs to step 1 and is issued for step 1",
        "trajectory 5/1 is committed and in no step",
        "trajectory 5/1 is committed and has no tokens",
    ]


def test_an_export_has_a_line_of_json_for_each_trajectory(bench: Bench) -> None:
    exported = cli("ledger", "export", bench.path)
    assert exported.returncode == 0, exported.stderr
    lines = [json.loads(line) for line in exported.stdout.splitlines()]
    assert [line["id"] for line in lines] == [f"{group}/{sample}" for group in range(6) for sample in range(2)]
    first, under_way = lines[0], lines[8]
    assert (first["prompt"], first["state"], first["step"]) == ("prompt 0", "committed", 1)
    assert (first["ids"], first["reward"], first["finish_reason"]) == ([0, 0], 1.0, "eos")
    assert under_way["ids"] == [5, 6, 7]
    assert under_way["logprobs"] == [-2.5, -3.0, -3.5]
    assert under_way["trained"] == [True] * 3
    assert under_way["segments"] == [{"start": 0, "tokens": 3, "version": "1.0", "owner": "rollout/1#1"}]
    assert (under_way["state"], under_way["step"], under_way["reward"]) == ("leased", None, None)


def test_what_is_no_ledger_is_refused_in_one_line(tmp_path: Path) -> None:
    for content in (None, b"", b"hello"):
        path = tmp_path / "other.db"
        if content is not None:
            path.write_bytes(content)
        refused = cli("ledger", "show", path)
        assert refused.returncode == 1
        assert refused.stderr.startswith("robustrl: ")
        assert len(refused.stderr.strip().splitlines()) == 1


# The tables that schema 2 changed, as they were.
FORMER = {
    "groups": ("grp", "prompt", "attempt", "owner", "request"),
    "segments": ("grp", "sample", "start", "ids", "logprobs", "version", "owner"),
    "consumption": ("step", "trainer", "trajectories"),
}


def test_a_ledger_of_schema_1_is_taken_up_where_it_stood(bench: Bench) -> None:
    batches = [bench.ledger.batch(step) for step in (1, 2)]
    bench.store.close()
    database = sqlite3.connect(bench.path)
    for name, columns in FORMER.items():
        rows = database.execute(f"SELECT {', '.join(columns)} FROM {name}").fetchall()
        database.execute(f"DROP TABLE {name}")
        database.execute(f"CREATE TABLE {name} ({', '.join(columns)}, sum INTEGER NOT NULL)")
        for row in rows:
            marks = ", ".join("?" * (len(row) + 1))
            database.execute(f"INSERT INTO {name} VALUES ({marks})", (*row, checksum(name, row)))
    database.execute("PRAGMA user_version=1")
    database.commit()
    database.close()
    with pytest.raises(LedgerError, match="cannot read"):
        reading.summarize(bench.path)
    bench.open()
    assert [bench.ledger.batch(step) for step in (1, 2)] == batches
    assert reading.verify(bench.path) == []
    bench.work(rollout(1), bench.lease(rollout(1), 2))
    assert bench.lease(rollout(1), 2).group in (4, 5, 6)


def test_compaction_removes_the_tokens_of_old_steps_and_nothing_else(bench: Bench) -> None:
    assert bench.ledger.compact(5) == 1  # only what is committed
    assert bench.ledger.compact(1) == 0
    found = reading.summarize(bench.path)
    assert (found.compacted, found.tokens) == (1, 11)
    assert reading.verify(bench.path) == []
    assert bench.ledger.audit(1).lost == ()
    bench.reopen()
    assert bench.ledger.batch(2)[0].ids() == [2, 0]
    with pytest.raises(LedgerError, match="too old to go back to"):
        bench.ledger.rewind(TRAINER, 0)
