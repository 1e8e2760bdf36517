"""The ledger behind the wire: waiting calls, grouped commits, the writer's buffer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from robustrl import events
from robustrl.config import PersistConfig
from robustrl.errors import (
    DeadlineError,
    FencedError,
    JobFailedError,
    LedgerError,
    RobustError,
    RoleDownError,
    StorageError,
)
from robustrl.persist import END, Batch, LeaseGrant, Ledger, LedgerClient, LedgerService, Store, service
from robustrl.roles import Identity, Member
from robustrl.wire import RpcClient, RpcServer, Secret, bind

TRAINER = Identity(Member("trainer"), 1)
SUPERVISOR = Identity(Member("supervisor"), 1)
R0, R1 = (Identity(Member("rollout", index), 1) for index in range(2))


class Rig:
    """A service, and clients that call it as over a wire (through msgpack), unless `down` says why not."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.events: list[Any] = []
        self.store = Store(folder / "ledger.db")
        self.ledger = Ledger(
            self.store,
            lambda index: b"prompt",
            groups_per_batch=2,
            samples_per_prompt=2,
            total_steps=3,
            config=PersistConfig(**config),
            emit=self.events.append,
        )
        self.service = LedgerService(self.ledger, emit=self.events.append)
        self.down: RobustError | None = None
        self.lost_answers = 0
        self.calls: list[str] = []

    def client(self, caller: Identity, **options: Any) -> LedgerClient:
        async def call(method: str, /, *, timeout: float | None = None, **params: Any) -> Any:
            self.calls.append(method)
            if self.down is not None:
                raise self.down
            asked = msgspec.msgpack.decode(msgspec.msgpack.encode(params))
            async with asyncio.timeout(timeout):
                answer = await self.service.handle(caller, method, asked)
            if self.lost_answers:
                self.lost_answers -= 1
                raise DeadlineError("the answer was lost")
            return msgspec.msgpack.decode(msgspec.msgpack.encode(answer))

        return LedgerClient(call, **({"flush_s": 0.005, "patience_s": 10.0} | options))

    async def work(self, ledger: LedgerClient, held: int = 0, tokens: int = 3) -> None:
        grant = await ledger.lease([held])
        assert isinstance(grant, LeaseGrant)
        writer = ledger.writer(grant)
        for sample in range(2):
            for position in range(writer.tokens(sample), tokens):
                writer.append(sample, position, -1.0, "1.0")
            writer.finish(sample, 1.0)
        await ledger.flush()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(limited())


async def until(condition: Callable[[], bool], limit: float = 10.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        await asyncio.sleep(0.002)


def test_a_waiting_trainer_gets_its_batch_when_the_last_answer_arrives(rig: Rig) -> None:
    async def test() -> None:
        trainer = rig.client(TRAINER)
        waiting = asyncio.create_task(trainer.next_batch(1, wait_s=20))
        async with rig.client(R0) as rollout:
            await rig.work(rollout)
            assert not waiting.done()
            await rig.work(rollout)
        batch = await waiting
        assert isinstance(batch, Batch) and len(batch.trajectories) == 4
        assert batch.trajectories[0].ids() == [0, 1, 2]
        assert rig.calls.count("ledger.next_batch") == 1

    run(test)


def test_a_wait_ends_by_itself_with_nothing(rig: Rig) -> None:
    async def test() -> None:
        assert await rig.client(TRAINER).next_batch(1, wait_s=0.05) is None

    run(test)


def test_a_waiting_rollout_takes_over_the_group_of_one_that_died(tmp_path: Path) -> None:
    rig = Rig(tmp_path, staleness=0)

    async def test() -> None:
        async with rig.client(R0) as dead, rig.client(R1) as heir:
            grants = [await dead.lease([0]), await dead.lease([0])]
            waiting = asyncio.create_task(heir.lease([0], wait_s=20))
            await until(lambda: rig.calls.count("ledger.lease") == 3)
            assert isinstance(grants[0], LeaseGrant)
            writer = dead.writer(grants[0])
            for position in range(5):
                writer.append(0, position, 0.0, "1.0")
            await dead.flush()
            assert await rig.client(SUPERVISOR).fence("rollout/0", 2) == 2
            grant = await waiting
            assert isinstance(grant, LeaseGrant) and grant.group == 0
            assert heir.writer(grant).tokens(0) == 5
            with pytest.raises(FencedError):
                writer.append(0, 5, 0.0, "1.0")
                await dead.flush()
            with pytest.raises(FencedError):
                writer.append(0, 6, 0.0, "1.0")

    run(test)


def test_a_cancelled_lease_is_the_answer_of_the_next_call(rig: Rig) -> None:
    async def test() -> None:
        ledger = rig.client(R0)
        rig.lost_answers = 1
        with pytest.raises(DeadlineError):
            await ledger.lease([0])
        first, second = await ledger.lease([0]), await ledger.lease([0])
        assert isinstance(first, LeaseGrant) and isinstance(second, LeaseGrant)
        assert (first.group, first.attempt, second.group) == (0, 1, 1)

    run(test)


def test_a_call_for_a_lease_that_was_replaced_by_another_takes_no_group_later(rig: Rig) -> None:
    """Its caller has long got its answer elsewhere: a group that it took would be nobody's."""

    async def test() -> None:
        async with rig.client(R0) as first, rig.client(R1) as second:
            others = [await second.lease([0]) for _ in range(2)]  # staleness 1: two steps of two groups
            held = [await first.lease([0]) for _ in range(2)]
            forgotten = asyncio.create_task(first.lease([0], wait_s=20))
            await until(lambda: rig.calls.count("ledger.lease") == 5)
            # The call goes on at the ledger although its caller does not wait any more.
            forgotten.cancel()
            stale = asyncio.create_task(
                rig.service.handle(R0, "ledger.lease", {"held_steps": [0], "request": first._request, "wait_s": 20.0})
            )
            await asyncio.sleep(0)
            again = asyncio.create_task(first.lease([0], wait_s=20))
            await until(lambda: rig.calls.count("ledger.lease") == 6)
            rig.ledger.release_owner(R1.member, 2)
            rig.service._change.set()
            grant = await again
            assert isinstance(grant, LeaseGrant)
            assert (await stale)["grant"] is None
            owners = [group.owner for group in rig.ledger._board.groups.values()]
            assert owners.count(R0) == 3
            assert owners.count(None) == 1
            assert all(isinstance(one, LeaseGrant) for one in (*others, *held))

    run(test)


def test_a_trajectory_of_several_turns_goes_on_elsewhere_with_its_tool_state_and_loss_mask(rig: Rig) -> None:
    async def test() -> None:
        async with rig.client(R0) as first:
            grant = await first.lease([0])
            assert isinstance(grant, LeaseGrant)
            writer = first.writer(grant)
            writer.append(0, 11, -1.0, "1.0", sampling='{"temperature":0.7}')
            writer.append(0, 12, -1.0, "1.0", sampling='{"temperature":0.7}', state=b"asked the tool")
            writer.observe(0, [91, 92, 93], state=b"turn 2")
            writer.append(0, 13, -2.0, "1.1")
            await first.flush()
        rig.ledger.release_owner(R0.member, 2)
        async with rig.client(R1) as second:
            again = await second.lease([0])
            assert isinstance(again, LeaseGrant)
            answer = again.samples[0]
            assert answer.ids() == [11, 12, 91, 92, 93, 13]
            assert answer.loss_mask() == [True, True, False, False, False, True]
            assert answer.versions() == ["1.0", "1.0", "", "", "", "1.1"]
            assert answer.state == b"turn 2"
            assert [segment.state for segment in answer.segments] == [b"asked the tool", b"turn 2", b""]
            assert answer.segments[0].sampling == '{"temperature":0.7}'
            writer = second.writer(again)
            writer.append(0, 14, -1.0, "1.1", state=b"turn 3")
            for sample in range(2):
                writer.finish(sample, 1.0)
            await second.flush()
            await rig.work(second)
        batch = await rig.client(TRAINER).next_batch(1)
        assert isinstance(batch, Batch)
        trained = batch.trajectories[0]
        assert (trained.ids()[-1], trained.loss_mask()[-1], trained.state) == (14, True, b"turn 3")

    run(test)


def test_words_are_resent_in_order_when_the_ledger_was_away(rig: Rig) -> None:
    async def test() -> None:
        async with rig.client(R0) as ledger:
            grant = await ledger.lease([0])
            assert isinstance(grant, LeaseGrant)
            writer = ledger.writer(grant)
            for position in range(50):
                writer.append(0, position, 0.0, "1.0" if position < 25 else "1.1")
                if position == 10:
                    await ledger.flush()
                    rig.down = RoleDownError("the ledger is away")
                if position == 30:
                    await until(lambda: rig.calls.count("ledger.write") >= 3)
            with pytest.raises(DeadlineError, match="39 tokens"):
                await ledger.flush(0.01)
            rig.down, rig.lost_answers = None, 2
            writer.finish(0, 1.0)
            await ledger.flush()
            assert ledger.unacked_tokens == 0
        sample = rig.ledger._leases._grant(rig.ledger._board.groups[0]).samples[0]
        assert sample.ids() == list(range(50))
        assert sample.versions() == ["1.0"] * 25 + ["1.1"] * 25
        assert rig.ledger.stats()["duplicate_appends"] > 0

    run(test)


def test_append_from_a_thread_waits_at_the_bound_and_not_before(rig: Rig) -> None:
    async def test() -> None:
        async with rig.client(R0, max_unacked_tokens=100) as ledger:
            grant = await ledger.lease([0])
            assert isinstance(grant, LeaseGrant)
            writer = ledger.writer(grant)
            rig.down = RoleDownError("the ledger is away")

            def generate() -> None:
                for position in range(150):
                    writer.append(0, position, 0.0, "1.0")

            thread = threading.Thread(target=generate)
            thread.start()
            await until(lambda: ledger.unacked_tokens == 100)
            assert thread.is_alive()
            with pytest.raises(LedgerError, match="event loop"):
                writer.append(1, 0, 0.0, "1.0")
            rig.down = None
            await asyncio.to_thread(thread.join)
            await ledger.flush()
        assert rig.ledger._board.groups[0].samples[0].tokens == 150

    run(test)


def test_append_gives_up_when_the_ledger_takes_nothing_for_the_patience(rig: Rig) -> None:
    async def test() -> None:
        async with rig.client(R0, max_unacked_tokens=1, patience_s=0.2) as ledger:
            grant = await ledger.lease([0])
            assert isinstance(grant, LeaseGrant)
            writer = ledger.writer(grant)
            rig.down = RoleDownError("the ledger is away")
            writer.append(0, 0, 0.0, "1.0")
            with pytest.raises(DeadlineError, match="took no token"):
                await asyncio.to_thread(writer.append, 0, 1, 0.0, "1.0")
            rig.down = None

    run(test)


def test_a_writer_whose_lease_went_elsewhere_is_told_to_stop(rig: Rig) -> None:
    async def test() -> None:
        async with rig.client(R0) as ledger:
            grant = await ledger.lease([0])
            assert isinstance(grant, LeaseGrant)
            writer = ledger.writer(grant)
            await rig.client(SUPERVISOR).discard_uncommitted()
            assert writer.append(0, 1, 0.0, "1.0")
            await ledger.flush()
            assert writer.lost and not writer.append(0, 2, 0.0, "1.0")
            other = await ledger.lease([0])
            assert isinstance(other, LeaseGrant) and ledger.writer(other).append(0, 1, 0.0, "1.0")

    run(test)


def test_a_word_that_contradicts_the_ledger_is_raised_in_the_generating_thread(rig: Rig) -> None:
    async def test() -> None:
        async with rig.client(R0) as ledger:
            grant = await ledger.lease([0])
            assert isinstance(grant, LeaseGrant)
            writer = ledger.writer(grant)
            writer.finish(0, float("nan"))
            await ledger.flush()
            with pytest.raises(LedgerError, match="reward"):
                writer.append(1, 0, 0.0, "1.0")

    run(test)


def test_many_words_share_one_transaction(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    flushes = 0
    real = rig.store.flush

    def flush(**options: Any) -> None:
        nonlocal flushes
        flushes += rig.store.dirty
        real(**options)

    async def test() -> None:
        one, other = rig.client(R0), rig.client(R1)
        async with one, other:
            writers = [ledger.writer(await ledger.lease([0])) for ledger in (one, other)]  # type: ignore[arg-type]
            monkeypatch.setattr(rig.store, "flush", flush)
            for position in range(200):
                for writer in writers:
                    writer.append(position % 2, position // 2, 0.0, "1.0")
            await asyncio.gather(one.flush(), other.flush())
            assert 1 <= flushes <= 2

    run(test)


def test_repeated_failures_reach_the_waiting_trainer_with_their_first_cause(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_failure_streak=1)

    async def test() -> None:
        waiting = asyncio.create_task(rig.client(TRAINER).next_batch(1, wait_s=20))
        async with rig.client(R0) as ledger:
            for cause in ("out of memory", "a consequence"):
                grant = await ledger.lease([0])
                assert isinstance(grant, LeaseGrant)
                ledger.writer(grant).fail("engine", cause)
                await ledger.flush()
        with pytest.raises(JobFailedError, match="out of memory"):
            await waiting

    run(test)


def test_a_batch_larger_than_one_answer_comes_in_pages(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PAGE_BYTES", 1000)

    async def test() -> None:
        async with rig.client(R0) as ledger:
            for _ in range(2):
                await rig.work(ledger, tokens=60)
        batch = await rig.client(TRAINER).next_batch(1)
        assert isinstance(batch, Batch)
        assert [one.id for one in batch.trajectories] == ["0/0", "0/1", "1/0", "1/1"]
        assert rig.calls.count("ledger.page") == 3

    run(test)


def test_a_full_disk_is_said_once_and_the_words_are_kept_until_it_has_room(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with rig.client(R0) as ledger:
            grant = await ledger.lease([0])
            assert isinstance(grant, LeaseGrant)
            real = rig.store.flush

            def full(**_: Any) -> None:
                rig.store.forget_pending()
                raise StorageError("the ledger cannot be written", why="database or disk is full")

            monkeypatch.setattr(rig.store, "flush", full)
            writer = ledger.writer(grant)
            for position in range(10):
                writer.append(0, position, 0.0, "1.0")
            await until(lambda: rig.calls.count("ledger.write") >= 3)
            monkeypatch.setattr(rig.store, "flush", real)
            await ledger.flush()
        assert rig.ledger._board.groups[0].samples[0].tokens == 10
        assert sum(isinstance(one, events.Alarm) for one in rig.events) == 1

    run(test)


def test_a_server_whose_store_was_taken_over_says_that_it_is_gone(rig: Rig, tmp_path: Path) -> None:
    async def test() -> None:
        Store(tmp_path / "ledger.db").close()
        with pytest.raises(RoleDownError):
            await rig.client(R0).lease([0])
        assert rig.service.superseded.is_set()

    run(test)


def test_a_rollout_may_not_fence_others_and_a_wrong_call_is_refused(rig: Rig) -> None:
    async def test() -> None:
        with pytest.raises(LedgerError, match="may not"):
            await rig.client(R0).fence("rollout/1", 9)
        for method, params in (("ledger.nothing", {}), ("ledger.write", {"ops": [{"op": "append"}]})):
            with pytest.raises(LedgerError):
                await rig.service.handle(R0, method, params)

    run(test)


def test_over_a_real_connection_a_run_comes_to_its_end(rig: Rig) -> None:
    async def test() -> None:
        secret = Secret(b"0123456789abcdef")
        server = RpcServer(rig.service.handle, secret, bind())
        await server.start()
        wires = {who: RpcClient(lambda: server.address, who, secret) for who in (R0, R1, TRAINER)}

        async def roll(who: Identity) -> None:
            async with LedgerClient(wires[who].call, flush_s=0.005) as ledger:
                while (grant := await ledger.lease([0, 1, 2, 3])) is not END:
                    if isinstance(grant, LeaseGrant):
                        writer = ledger.writer(grant)
                        for sample in range(2):
                            writer.append(sample, 1, 0.0, "1.0")
                            writer.finish(sample, 0.5)
                        await ledger.flush()

        async def train() -> None:
            ledger = LedgerClient(wires[TRAINER].call)
            step = 1
            while (batch := await ledger.next_batch(step)) is not END:
                if isinstance(batch, Batch):
                    await ledger.commit(step)
                    step += 1
            assert (await ledger.audit(3)).lost == ()

        await asyncio.gather(roll(R0), roll(R1), train())
        for wire in wires.values():
            await wire.close()
        await server.close()

    run(test)
