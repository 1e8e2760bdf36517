"""The supervisor over a runtime that only writes down what it is told: what it does after a predecessor's death."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from robustrl import events
from robustrl.config import RobustConfig
from robustrl.detect import ProcessId
from robustrl.restart import JobSpec, Journal, Loss, MemberRecord, MemberState, RoleSpec, Supervisor
from robustrl.restart.journal import JobState
from robustrl.roles import Identity, Member
from robustrl.wire import RpcClient, Secret, bind

SECRET = Secret(b"the secret of this job")
NOBODY = 1 << 22
"""A pid that no process has: Linux gives lower ones."""
JOB = JobSpec(
    roles=(
        RoleSpec("trainer", ("x",)),
        RoleSpec("rollout", ("x",), 2),
        RoleSpec("standby", ("x",), 1, ("trainer", "rollout")),
    ),
    config=RobustConfig.from_dict({"detect": {"silence_s": 50.0}}),
)
S = MemberState


class Told:
    """A runtime without processes."""

    def __init__(self) -> None:
        self.spawned: list[str] = []
        self.ended: list[int] = []

    async def spawn(self, identity: Identity, role: RoleSpec) -> ProcessId:
        self.spawned.append(str(identity))
        return ProcessId(NOBODY + len(self.spawned), 1)

    def watch(self, process: ProcessId, on_exit: Callable[[str], None]) -> None:
        pass

    async def end(self, process: ProcessId, grace_s: float) -> None:
        self.ended.append(process.pid)


@contextlib.asynccontextmanager
async def supervising(folder: Path, said: list[Any], incarnation: int = 1) -> AsyncIterator[tuple[Supervisor, Told]]:
    told, journal = Told(), Journal(folder / "supervisor.db")
    supervisor = Supervisor(
        job=JOB,
        run_dir=folder,
        me=Identity(Member("supervisor"), incarnation),
        runtime=told,
        journal=journal,
        server_socket=bind(),
        secret=SECRET,
        emit=said.append,
    )
    running = asyncio.create_task(supervisor.run())
    try:
        yield supervisor, told
    finally:
        supervisor.stop("finished", "")
        async with asyncio.timeout(20.0):
            await running
        journal.close()


async def until(predicate: Callable[[], Any]) -> None:
    async with asyncio.timeout(10.0):
        while not predicate():  # noqa: ASYNC110 - what is waited for has no Event
            await asyncio.sleep(0.005)


def write(folder: Path, records: list[MemberRecord], losses: list[Loss]) -> None:
    journal = Journal(folder / "supervisor.db")
    for record in records:
        journal.put_record(record)
    journal.put_losses(losses)
    journal.close()


def loss(name: str, **more: Any) -> Loss:
    return Loss(Identity.parse(name), 0.0, 3, f"the cause of {name}", True, **more)


def dead(name: str) -> MemberRecord:
    identity = Identity.parse(name)
    return MemberRecord(identity.member, identity.incarnation, S.DEAD, ProcessId(NOBODY, 1), served=True)


def test_a_new_job_starts_every_member_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with supervising(tmp_path, []) as (_, told):
            await until(lambda: len(told.spawned) == 4)
        assert told.spawned == ["trainer/0#1", "rollout/0#1", "rollout/1#1", "standby/0#1"]
        assert sorted(told.ended) == [NOBODY + n for n in range(1, 5)]

    asyncio.run(run())


@pytest.mark.parametrize("losses", [[], [loss("rollout/1#2")]], ids=["before its plan", "within its plan"])
def test_a_recovery_that_a_killed_predecessor_had_begun_is_done_by_its_successor(
    tmp_path: Path, losses: list[Loss]
) -> None:
    write(tmp_path, [dead("rollout/1#2")], losses)

    async def run() -> None:
        async with supervising(tmp_path, [], 2) as (supervisor, told):
            await until(lambda: told.spawned)
            assert told.spawned == ["rollout/1#3"]
            assert told.ended == [NOBODY]  # whatever was left of the dead one is gone before
            await until(lambda: supervisor._history[-1].handled)
            assert [one.identity for one in supervisor._history] == [Identity.parse("rollout/1#2")]

    asyncio.run(run())


def test_a_member_that_was_given_up_stays_so(tmp_path: Path) -> None:
    write(tmp_path, [dead("rollout/1#2"), dead("rollout/0#1")], [loss("rollout/1#2", handled=True)])

    async def run() -> None:
        async with supervising(tmp_path, [], 2) as (_, told):
            await until(lambda: told.spawned)
        assert told.spawned == ["rollout/0#2"]

    asyncio.run(run())


def test_a_place_in_the_pool_that_a_promotion_emptied_is_filled_by_the_successor(tmp_path: Path) -> None:
    write(tmp_path, [MemberRecord(Member("standby"), 1, S.PROMOTED, ProcessId(NOBODY, 1))], [])

    async def run() -> None:
        async with supervising(tmp_path, [], 2) as (_, told):
            await until(lambda: told.spawned)
        assert told.spawned == ["standby/0#2"]

    asyncio.run(run())


def test_members_that_died_while_no_supervisor_watched_are_replaced(tmp_path: Path) -> None:
    gone = MemberRecord(Member("trainer"), 4, S.SERVING, ProcessId(NOBODY, 1), served=True)
    unborn = MemberRecord(Member("rollout", 1), 1, S.STARTING)
    write(tmp_path, [gone, unborn], [])
    said: list[Any] = []

    async def run() -> None:
        async with supervising(tmp_path, said, 2) as (_, told):
            await until(lambda: len(told.spawned) == 2)
        assert sorted(told.spawned) == ["rollout/1#2", "trainer/0#5"]

    asyncio.run(run())
    verdicts = {event.member: event.evidence for event in events.of_kind(said, events.VerdictReached)}
    assert verdicts == {
        "trainer/0": "it ended while no supervisor watched",
        "rollout/1": "it ended while it was being started",
    }


def test_a_job_whose_end_was_decided_is_ended_by_the_successor(tmp_path: Path) -> None:
    write(tmp_path, [MemberRecord(Member("rollout", 1), 1, S.SERVING, ProcessId(NOBODY, 1))], [])
    journal = Journal(tmp_path / "supervisor.db")
    journal.put_job(JobState("failed", "the first cause"))
    journal.close()
    said: list[Any] = []

    async def run() -> None:
        async with supervising(tmp_path, said, 2) as (_, told):
            pass
        assert told.spawned == []
        assert told.ended == [NOBODY]

    asyncio.run(run())
    assert [(e.outcome, e.cause) for e in events.of_kind(said, events.JobEnded)] == [("failed", "the first cause")]


def test_a_loss_counts_as_recovered_once_the_place_is_filled_again(tmp_path: Path) -> None:
    write(tmp_path, [dead("standby/0#1"), dead("rollout/0#1")], [])

    async def run() -> None:
        async with supervising(tmp_path, [], 2) as (supervisor, told):
            await until(lambda: len(told.spawned) == 2)
            for name in told.spawned:
                rpc = RpcClient(lambda: supervisor.desk.address, Identity.parse(name), SECRET)
                await rpc.call("member.ready", milestone="attached")
                assert not all(one.recovered for one in supervisor._history)
                await rpc.call("member.ready", milestone="serving")
                await rpc.close()
            assert len(supervisor._history) == 2
            assert all(one.recovered for one in supervisor._history)

    asyncio.run(run())


def test_a_member_that_reports_twice_is_replaced_once(tmp_path: Path) -> None:
    said: list[Any] = []

    async def run() -> None:
        async with supervising(tmp_path, said) as (supervisor, told):
            await until(lambda: len(told.spawned) == 4)
            rpc = RpcClient(lambda: supervisor.desk.address, Identity.parse("rollout/0#1"), SECRET)
            await rpc.call("member.ready", milestone="attached")
            await asyncio.gather(
                *(rpc.call("member.failed", what="ValueError: no") for _ in range(2)), return_exceptions=True
            )
            await until(lambda: supervisor._history and supervisor._history[-1].handled)
            await rpc.close()
            assert [one.identity for one in supervisor._history] == [Identity.parse("rollout/0#1")]
            assert supervisor.roster[Member("rollout", 0)].incarnation == 2

    asyncio.run(run())
    (verdict,) = events.of_kind(said, events.VerdictReached)
    assert verdict.evidence == "ValueError: no"
