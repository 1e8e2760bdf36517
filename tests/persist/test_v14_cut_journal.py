"""V14: the ledger's journal is cut somewhere in its last record."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from robustrl import events
from robustrl.persist import Ledger, Store

RECORDS = 1000
WRITER = """
import sys
from robustrl.persist.store import Store
store = Store(sys.argv[1])
store._connection().execute("PRAGMA wal_autocheckpoint=0")  # all of it stays in the journal
for number in range({records}):
    store.put("owners", f"rollout/{{number}}#1", number)
    store.flush()
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a ledger whose process was killed after 1,000 records."""
    folder = tmp_path_factory.mktemp("journal")
    command = [sys.executable, "-c", WRITER.format(records=RECORDS), str(folder / "ledger.db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"done\n"
        os.kill(writer.pid, signal.SIGKILL)
    return folder


def opened(journal: Path, folder: Path, cut: int) -> tuple[list[int], list[str]]:
    """(records, alarms) of a ledger that is opened on a copy, `cut` bytes shorter."""
    (folder / "ledger.db").write_bytes((journal / "ledger.db").read_bytes())
    log = (journal / "ledger.db-wal").read_bytes()
    (folder / "ledger.db-wal").write_bytes(log[: len(log) - cut])
    said: list[events.Event] = []
    store = Store(folder / "ledger.db")
    try:
        prompts = [b"?"]
        Ledger(store, prompts, groups_per_batch=1, samples_per_prompt=1, total_steps=1, emit=said.append)
        found = sorted(int(tokens) for _, tokens in store.rows("owners"))
    finally:
        store.close()
    return found, [event.text for event in said if isinstance(event, events.Alarm)]


@pytest.mark.parametrize("cut", [1, 2, 24, 63, 100, 199, 200])
def test_a_cut_in_the_last_record_costs_that_record_and_is_said_once(journal: Path, tmp_path: Path, cut: int) -> None:
    found, alarms = opened(journal, tmp_path, cut)
    assert found == list(range(RECORDS - 1))
    assert len(alarms) == 1
    assert "were cut off" in alarms[0]


def test_a_journal_that_a_kill_left_behind_is_whole_and_nothing_is_said(journal: Path, tmp_path: Path) -> None:
    assert opened(journal, tmp_path, 0) == (list(range(RECORDS)), [])
