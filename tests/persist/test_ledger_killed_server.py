"""A ledger server that is killed again and again under three writers: what it acknowledged is there."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

from ledger_writer import token

from robustrl.persist import Batch, Ledger, LedgerClient, Store
from robustrl.roles import Identity, Member
from robustrl.wire import Address, RpcClient, Secret

HERE = Path(__file__).parent
B, N, STEPS, LENGTH = 4, 2, 9, 40
TRAINER = Identity(Member("trainer"), 1)


def start(script: str, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(HERE / script), *map(str, arguments)])


def acked(folder: Path) -> dict[tuple[int, int], int]:
    most: dict[tuple[int, int], int] = {}
    for path in folder.glob("acked-*"):
        for line in path.read_text().splitlines():
            group, sample, tokens = map(int, line.split())
            most[group, sample] = max(tokens, most.get((group, sample), 0))
    return most


def check_everything_acknowledged_is_there(folder: Path) -> int:
    """Reads the file as a crashed server left it, without becoming its writer. Returns tokens that were checked."""
    copy = folder / "copy"
    copy.mkdir(exist_ok=True)
    promised = acked(folder)
    for name in ("ledger.db", "ledger.db-wal"):
        (copy / name).unlink(missing_ok=True)
        if (folder / name).exists():
            (copy / name).write_bytes((folder / name).read_bytes())
    (copy / "ledger.db-shm").unlink(missing_ok=True)
    store = Store(copy / "ledger.db")
    there: dict[tuple[int, int], list[int]] = {}
    for group, sample, start_at, ids, *_ in store.rows("segments"):
        values = [int.from_bytes(ids[at : at + 4], "little", signed=True) for at in range(0, len(ids), 4)]
        held = there.setdefault((group, sample), [])
        assert start_at == len(held), "segments overlap or leave a gap"
        held += values
    assert store.damaged == []
    store.close()
    for key, tokens in promised.items():
        assert len(there.get(key, [])) >= tokens, f"{key}: {tokens} tokens were acknowledged"
    for key, values in there.items():
        assert values == [token(*key, position) for position in range(len(values))]
    return sum(promised.values())


async def consume(folder: Path) -> tuple[list[str], int]:
    """Trains all steps, then commits; returns the ids in the order of training, and how many lost trajectories."""
    rpc = RpcClient(lambda: Address.parse((folder / "address").read_text()), TRAINER, Secret.read(folder / "secret"))
    ledger = LedgerClient(rpc.call)
    ids = []
    for step in range(1, STEPS + 1):
        batch = None
        while not isinstance(batch, Batch):
            batch = await ledger.next_batch(step, wait_s=1.0)
        ids += [one.id for one in batch.trajectories]
        assert all(one.tokens == LENGTH for one in batch.trajectories)
        await ledger.commit(step)
    audit = await ledger.audit(STEPS)
    await rpc.close()
    return ids, len(audit.lost) + len(audit.duplicated)


def test_what_a_killed_ledger_server_acknowledged_survives(tmp_path: Path) -> None:
    Secret.create(tmp_path / "secret")
    random_ = random.Random(5)
    server = start("ledger_server.py", tmp_path, B, N, STEPS)
    writers: list[subprocess.Popen[bytes]] = []
    kills = checked = 0
    deadline = time.monotonic() + 60
    try:
        while not (tmp_path / "address").exists():
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.01)
        writers = [start("ledger_writer.py", tmp_path, f"rollout/{one}#1", LENGTH) for one in range(3)]
        while any(writer.poll() is None for writer in writers):
            assert time.monotonic() < deadline, "the writers do not get on"
            mark = sum(acked(tmp_path).values()) + random_.randrange(20, 400)  # a moment of the work, not of the clock
            while sum(acked(tmp_path).values()) < mark and any(writer.poll() is None for writer in writers):
                assert time.monotonic() < deadline, "the writers do not get on"
                time.sleep(random_.uniform(0.001, 0.02))
            server.kill()
            server.wait()
            kills += 1
            checked = check_everything_acknowledged_is_there(tmp_path)
            server = start("ledger_server.py", tmp_path, B, N, STEPS)
        assert [writer.returncode for writer in writers] == [0, 0, 0]
        assert kills >= 4 and checked > 0
        ids, wrong = asyncio.run(asyncio.wait_for(consume(tmp_path), 30))
        assert ids == [f"{group}/{sample}" for group in range(B * STEPS) for sample in range(N)]
        assert wrong == 0
    finally:
        for process in (*writers, server):
            process.kill()
            process.wait()


def test_reopening_after_the_kill_continues_where_the_store_is(tmp_path: Path) -> None:
    """What was killed between a write and its flush was told to nobody, and the reopened ledger does not know it."""
    store = Store(tmp_path / "ledger.db")
    options = {"groups_per_batch": 1, "samples_per_prompt": 1, "total_steps": 2}
    ledger = Ledger(store, [b"a", b"b"], **options)
    owner = Identity(Member("rollout"), 1)
    ledger.lease(owner, [0])
    with ledger.deferred():
        ledger.append(owner, 0, 0, attempt=1, start=0, ids=[1], logprobs=[0.0], version="1.0")
    store.close()  # as a kill would, without a flush
    again = Ledger(Store(tmp_path / "ledger.db"), [b"a", b"b"], **options)
    assert again.append(owner, 0, 0, attempt=1, start=0, ids=[1], logprobs=[0.0], version="1.0") == "accepted"
