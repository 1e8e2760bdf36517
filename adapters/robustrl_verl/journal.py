"""What the trainer has taken from verl's queue since its newest checkpoint, kept in the queue to be handed out again.

A trainer that goes back to version c gets the very batches of c + 1 on, in the same order; nothing is generated again.
The queue's actor holds the journal because it outlives the trainer. Entries carry the parameter version that the
trainer had when it asked; a checkpoint of version v settles all before v.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from robustrl_verl.hub import ask, ask_now

log = logging.getLogger("robustrl.verl")

LIMIT_BYTES: Final = 4 << 30
"""Bytes of samples that are kept at the most; then the oldest go, and are said to be lost if they are missed."""
CHANGE_S: Final = 30.0
"""Seconds for the queue to take a change in."""


class Entry(NamedTuple):
    version: int
    sample: Any

    @property
    def size(self) -> int:
        return len(self.sample) if isinstance(self.sample, bytes) else 0


class Rewound(NamedTuple):
    """What `Journal.rewind` did."""

    again: int
    """Samples that are handed out again."""
    settled: int
    """Samples that the checkpoint had in it already."""
    lost: int
    """Samples that were trained on after the checkpoint and are not there any more."""


class Journal:
    """Pure bookkeeping. `limit` is in bytes."""

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        self.limit = limit
        self.epoch = 0
        """Grows with each trainer; who asked in an earlier one is gone."""
        self.version = 0
        """What the trainer has; entries made now carry it."""
        self.saved: int | None = None
        """The newest version that this run has a checkpoint of."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """Where the queue's own methods run."""
        self.again: deque[Any] = deque()
        """What is handed out before anything new."""
        self._handed: deque[Entry] = deque()
        self._bytes = 0
        self._dropped: list[int] = []

    def begin(self, version: int) -> None:
        """The trainer has parameters `version` and begins to ask for the batch after it."""
        self.version = version

    def hand_out(self, sample: Any) -> None:
        entry = Entry(self.version, sample)
        self._handed.append(entry)
        self._bytes += entry.size
        while self._bytes > self.limit:
            old = self._handed.popleft()
            self._bytes -= old.size
            self._dropped.append(old.version)

    def commit(self, version: int) -> None:
        """A checkpoint of `version` is complete."""
        self.saved = version
        self._settle(version)

    def rewind(self, version: int) -> Rewound:
        """A new trainer begins at `version`; whoever asked before it gets nothing any more."""
        settled = self._settle(version)
        lost = len(self._dropped)
        self._dropped.clear()
        again = [entry.sample for entry in self._handed]
        self.again.extendleft(reversed(again))
        self._handed.clear()
        self._bytes = 0
        self.version = version
        self.epoch += 1
        return Rewound(len(again), settled, lost)

    def give_back(self, sample: Any) -> None:
        """Somebody who is gone had taken it; it is the newest that was taken."""
        self.again.append(sample)

    def _settle(self, version: int) -> int:
        before = len(self._handed)
        while self._handed and self._handed[0].version < version:
            self._bytes -= self._handed.popleft().size
        self._dropped = [dropped for dropped in self._dropped if dropped >= version]
        return before - len(self._handed)


# -- inside the queue's actor ---------------------------------------------------------------------------------------


def journal_of(queue: Any) -> Journal:
    found: Journal | None = getattr(queue, "_robustrl_journal", None)
    if found is None:
        found = queue._robustrl_journal = Journal()
    return found


async def get_sample(wrapped: Callable[..., Any], queue: Any) -> Any:
    """Wraps MessageQueue.get_sample: old samples first, and nothing for a trainer that has been replaced."""
    journal = journal_of(queue)
    journal.loop = asyncio.get_running_loop()
    epoch = journal.epoch

    def ready() -> bool:
        return bool(journal.epoch != epoch or journal.again or queue.queue or not queue.running)

    async with queue._consumer_condition:
        await queue._consumer_condition.wait_for(ready)
    if journal.epoch != epoch:
        return None
    if journal.again:
        sample = journal.again.popleft()
        journal.hand_out(sample)
        return sample, len(queue.queue) + len(journal.again)
    answer = await wrapped(queue)
    if answer is None:
        return None
    if journal.epoch != epoch:
        journal.give_back(answer[0])
        async with queue._consumer_condition:
            queue._consumer_condition.notify_all()
        return None
    journal.hand_out(answer[0])
    return answer


def begin(queue: Any, version: int) -> None:
    journal_of(queue).begin(version)


def commit(queue: Any, version: int) -> None:
    _on_its_loop(queue, journal_of(queue).commit, version)


def at(queue: Any) -> tuple[int, int | None]:
    """(the version that the trainer has, the newest one that was saved)."""
    journal = journal_of(queue)
    return journal.version, journal.saved


def rewind(queue: Any, version: int) -> Rewound:
    """See `Journal.rewind`. Whoever waits for a sample looks again."""
    done: Rewound = _on_its_loop(queue, journal_of(queue).rewind, version)
    return done


def _on_its_loop(queue: Any, work: Callable[..., Any], *args: Any) -> Any:
    """Ray runs what an async actor is called with on a thread of its own; the queue belongs to its event loop."""

    async def change() -> Any:
        async with queue._consumer_condition:
            result = work(*args)
            queue._consumer_condition.notify_all()
        return result

    loop = journal_of(queue).loop
    if loop is None:  # nobody has asked for a sample yet
        return work(*args)
    return asyncio.run_coroutine_threadsafe(change(), loop).result(CHANGE_S)


# -- inside the trainer's actor -------------------------------------------------------------------------------------


async def begin_batch(wrapped: Callable[..., Any], trainer: Any) -> Any:
    """Wraps FullyAsyncTrainer._get_samples_from_queue."""
    queue = trainer.message_queue_client.queue_actor
    await ask(queue.__ray_call__.remote(begin, trainer.current_param_version))
    return await wrapped(trainer)


def commit_batches(wrapped: Callable[..., Any], trainer: Any, force: bool = False) -> None:
    """Wraps FullyAsyncTrainer._fit_save_checkpoint: what a checkpoint has in it need not be kept."""
    before = trainer.last_ckpt_version
    wrapped(trainer, force)
    if trainer.last_ckpt_version != before:
        queue = trainer.message_queue_client.queue_actor
        ask_now(queue.__ray_call__.remote(commit, trainer.last_ckpt_version))
