"""The samples that a trainer took after its newest checkpoint are handed out again. No verl is needed for it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from robustrl_verl import journal
from robustrl_verl.journal import Journal


class Queue:
    """The parts of verl's MessageQueue that the journal touches."""

    def __init__(self) -> None:
        self.queue: deque[Any] = deque()
        self.running = True
        self._lock = asyncio.Lock()
        self._consumer_condition = asyncio.Condition(self._lock)

    async def put(self, sample: Any) -> None:
        async with self._lock:
            self.queue.append(sample)
            self._consumer_condition.notify_all()

    async def get(self) -> Any:
        async with self._lock:
            while not self.queue and self.running:
                await self._consumer_condition.wait()
            if not self.queue:
                return None
            return self.queue.popleft(), len(self.queue)


async def take(queue: Queue) -> Any:
    return await journal.get_sample(Queue.get, queue)


async def called(function: Any, *args: Any) -> Any:
    """As Ray calls into an actor: from a thread that is not the event loop's."""
    return await asyncio.to_thread(function, *args)


async def filled(samples: list[Any]) -> Queue:
    queue = Queue()
    for sample in samples:
        await queue.put(sample)
    return queue


def test_without_a_loss_samples_come_as_they_were_put() -> None:
    async def go() -> None:
        queue = await filled([b"a", b"b", None])
        assert [await take(queue) for _ in range(3)] == [(b"a", 2), (b"b", 1), (None, 0)]

    asyncio.run(go())


def test_a_new_trainer_gets_the_same_samples_in_the_same_order_then_new_ones() -> None:
    async def go() -> None:
        queue = await filled([b"%d" % number for number in range(6)])
        for version in range(4):
            journal.begin(queue, version)
            assert await take(queue) == (b"%d" % version, 5 - version)
            if version == 1:
                await called(journal.commit, queue, 2)
        assert journal.at(queue) == (3, 2)
        assert await called(journal.rewind, queue, 2) == (2, 0, 0)
        journal.begin(queue, 2)
        assert [(await take(queue))[0] for _ in range(4)] == [b"2", b"3", b"4", b"5"]

    asyncio.run(go())


def test_what_the_checkpoint_has_is_not_trained_on_twice_though_nobody_could_say_so() -> None:
    """The trainer died between the checkpoint's last byte and its word to the queue."""

    async def go() -> None:
        queue = await filled([b"0", b"1", b"2"])
        for version in range(3):
            journal.begin(queue, version)
            await take(queue)
        assert await called(journal.rewind, queue, 2) == (1, 2, 0)
        assert (await take(queue))[0] == b"2"

    asyncio.run(go())


def test_who_waited_for_the_dead_trainer_takes_nothing_away() -> None:
    async def go() -> None:
        queue = await filled([])
        waiting = asyncio.create_task(take(queue))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await called(journal.rewind, queue, 0)
        heir = asyncio.create_task(take(queue))
        assert await asyncio.wait_for(waiting, 5) is None
        await queue.put(b"new")
        assert await asyncio.wait_for(heir, 5) == (b"new", 0)

    asyncio.run(go())


def test_a_sample_in_the_hands_of_the_dead_goes_to_the_heir() -> None:
    async def go() -> None:
        queue = await filled([b"x"])
        gate = asyncio.Event()

        async def slow(inner: Queue) -> Any:
            answer = await Queue.get(inner)
            await gate.wait()
            return answer

        dying = asyncio.create_task(journal.get_sample(slow, queue))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not queue.queue
        await called(journal.rewind, queue, 0)
        heir = asyncio.create_task(take(queue))
        await asyncio.sleep(0)
        gate.set()
        assert await asyncio.wait_for(dying, 5) is None
        assert (await asyncio.wait_for(heir, 5))[0] == b"x"

    asyncio.run(go())


def test_what_does_not_fit_is_said_to_be_lost() -> None:
    kept = Journal(limit=10)
    for version in range(4):
        kept.begin(version)
        kept.hand_out(b"12345")
    assert kept.rewind(0) == (2, 0, 2)
    kept = Journal(limit=10)
    for version in range(4):
        kept.begin(version)
        kept.hand_out(b"12345")
    kept.commit(2)
    assert kept.rewind(2) == (2, 0, 0)


@given(st.lists(st.sampled_from(["step", "save", "lose"]), max_size=60), st.integers(1, 3))
def test_each_version_is_trained_on_the_same_samples_however_often_it_is_done(moves: list[str], size: int) -> None:
    """Whatever is lost when: the batch of a version never changes, and none is left out."""
    kept = Journal()
    fresh = iter(range(10**6))
    trained: dict[int, list[int]] = {}
    version = saved = 0
    for move in moves:
        if move == "step":
            kept.begin(version)
            batch = []
            for _ in range(size):
                sample = kept.again.popleft() if kept.again else next(fresh)
                kept.hand_out(sample)
                batch.append(sample)
            assert trained.setdefault(version, batch) == batch
            version += 1
        elif move == "save":
            saved = version
            kept.commit(version)
        else:
            version = saved
            kept.rewind(version)
    assert [sample for _, batch in sorted(trained.items()) for sample in batch] == list(range(size * len(trained)))
