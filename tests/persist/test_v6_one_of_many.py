"""V6: 16 groups of 8, and one of the 128 answers never comes back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from robustrl import events
from robustrl.events import E, of_kind, read_events
from robustrl.persist import Batch, LedgerClient
from robustrl.roles import Identity
from robustrl.wire import Address, RpcClient, Secret

HERE = Path(__file__).parent
GROUPS, SAMPLES = 16, 8
LEASE_S = 1.0


class Run:
    """A ledger server, three workers and a trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = Secret.create(folder / "secret")
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, script: str, *arguments: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, str(HERE / script), str(self.folder), *map(str, arguments)])
        self.processes.append(process)
        return process

    def serve(self, rule: str) -> subprocess.Popen[bytes]:
        settings = (f"lease_s={LEASE_S}", "max_barren_attempts=2", f'partial_groups="{rule}"')
        self.server = self.start("ledger_server.py", GROUPS, SAMPLES, 1, *settings)
        return self.server

    def work(self, fault: str) -> None:
        for index in range(3):
            self.start("ledger_worker.py", f"rollout/{index}#1", fault, 3, 5)

    def batch(self) -> Batch:
        async def ask() -> Batch:
            trainer = Identity.parse("trainer/0#1")
            rpc = RpcClient(lambda: Address.parse((self.folder / "address").read_text()), trainer, self.secret)
            try:
                ledger = LedgerClient(rpc.call)
                async with asyncio.timeout(40.0):
                    while True:
                        batch = await ledger.next_batch(1, wait_s=1.0)
                        if isinstance(batch, Batch):
                            return batch
            finally:
                await rpc.close()

        while not (self.folder / "address").exists():
            assert self.server.poll() is None
        return asyncio.run(ask())

    def said(self, kind: type[E]) -> list[E]:
        return list(of_kind(read_events(self.folder / "events.jsonl"), kind))

    def leases(self, group: int) -> list[str]:
        return [event.owner for event in self.said(events.Leased) if event.group == group]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


def test_an_answer_that_was_lost_on_the_way_is_asked_for_again_once_and_the_step_is_whole(run: Run) -> None:
    run.serve("drop")
    run.work("lose")
    batch = run.batch()
    assert len({one.id for one in batch.trajectories}) == GROUPS * SAMPLES
    assert (batch.partial, batch.omitted) == ((), ())
    awaited = [event.text for event in run.said(events.Alarm)]
    assert len(awaited) == 1
    assert awaited[0].startswith("nothing came of 3/5 from rollout/")
    assert len(run.leases(3)) == 2
    for worker in run.processes[1:]:
        assert worker.wait(20) == 0


@pytest.mark.parametrize(("rule", "answers"), [("use", 127), ("drop", 120)])
def test_a_sibling_that_always_hangs_makes_its_group_partial_and_wedges_nobody(
    run: Run, rule: str, answers: int
) -> None:
    server = run.serve(rule)
    run.work("hang")
    batch = run.batch()
    ids = {one.id for one in batch.trajectories}
    assert len(ids) == answers
    assert "3/5" not in ids
    assert (batch.partial, batch.omitted) == (((3,), ()) if rule == "use" else ((), (3,)))
    [given_up] = run.said(events.GroupGivenUp)
    assert (given_up.group, given_up.finished, given_up.samples, given_up.rule) == (3, 7, 8, rule)
    assert len(run.leases(3)) == 3  # the first brought seven answers; two more brought nothing
    for worker in run.processes[1:]:
        assert worker.wait(20) == 0
    # A job that comes back draws the same batch, and does not wait for the lost sibling again.
    server.kill()
    server.wait(10)
    (run.folder / "address").unlink()
    run.serve(rule)
    again = run.batch()
    assert again.replay
    assert again.trajectories == batch.trajectories
    assert (again.partial, again.omitted) == (batch.partial, batch.omitted)
