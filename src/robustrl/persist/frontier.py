"""What the optimizer has consumed: the trainer's side of the ledger.

The batch of step t (from 1) is made of the next B groups in the order of the prompt source, and it is written down
before it is handed out. The saved data position is therefore where consumption stands, never where a loader stands.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

from robustrl import events
from robustrl.config import PersistConfig
from robustrl.errors import JobFailedError, LedgerError
from robustrl.persist import trajectory as life
from robustrl.persist.board import Board, Group, as_sample
from robustrl.persist.records import END, Batch, End, Scored
from robustrl.persist.trajectory import State, trajectory_id
from robustrl.roles import Identity

_encode = msgspec.msgpack.Encoder().encode
_decode_ids = msgspec.msgpack.Decoder(list[str]).decode


class Span(NamedTuple):
    """What one step consumed."""

    ids: list[str]
    """Trajectories in the order in which they were handed out."""
    next: int
    """The first group after it."""


class Frontier:
    """Steps and the groups that they consumed.

    Args:
        board: the groups.
        groups_per_batch: B.
        config: what becomes of partial groups.
    """

    def __init__(self, board: Board, groups_per_batch: int, config: PersistConfig) -> None:
        self._board = board
        self._b = groups_per_batch
        self._config = config
        self.spans: dict[int, Span] = {}
        self.committed = 0
        """Newest step with a durable point; 0 before the first."""
        self.consumed = 0
        """Newest step whose batch was handed to the optimizer."""

    def load(self, committed: int) -> None:
        rows = self._board.store.rows("consumption")
        self.spans = {int(step): Span(_decode_ids(ids), int(after)) for step, _, ids, after in rows}
        self.committed = committed
        self.consumed = max(self.spans, default=0)

    def after(self, step: int) -> int:
        """The first group after those of `step`."""
        return self.spans[step].next if step else 0

    @property
    def low(self) -> int:
        """The first group that is not committed."""
        return self.after(self.committed)

    def usable(self, group: Group) -> bool:
        """Whether a group whose samples are settled is trained on."""
        return group.whole or (self._config.partial_groups == "use" and bool(group.finished))

    def skipped(self, below: int | None = None) -> int:
        """Groups (with a number under `below`, which is not consumed) whose place in a batch the next one takes."""
        if self._config.partial_groups != "refill":
            return 0
        consumed = self.after(self.consumed)
        count = consumed - min(self.consumed * self._b, consumed)
        later = (group for group in self._board.groups.values() if group.index >= consumed)
        return count + sum(
            group.done and not self.usable(group) and (below is None or group.index < below) for group in later
        )

    # -- moves of the trainer ----------------------------------------------------------------------------------------

    def next_batch(self, trainer: Identity, step: int, end: int) -> Batch | End | None:
        """See `Ledger.next_batch`. `end` is the first group number that the run does not reach."""
        if not 1 <= step <= self.consumed + 1:
            raise LedgerError(
                f"step {step} cannot have a batch now",
                who=trainer,
                why=f"step {self.consumed} was the last that got one",
                do="Steps follow on each other from 1; after going back call rewind.",
            )
        if step <= self.consumed:
            batch = self._batch(step, replay=True)
            self._board.counts["replayed"] += 1
        else:
            chosen = self._choose(end)
            if chosen is None or isinstance(chosen, End):
                return chosen
            self._consume(trainer, step, *chosen)
            batch = self._batch(step, replay=False)
        self._board.say(
            events.BatchConsumed(
                step=step,
                incarnation=trainer.incarnation,
                trajectories=tuple(one.id for one in batch.trajectories),
                replay=batch.replay,
            )
        )
        return batch

    def _choose(self, end: int) -> tuple[list[Group], int] | End | None:
        """The groups of the next batch and the first after them; None while one is not settled."""
        first = index = self.after(self.consumed)
        chosen: list[Group] = []
        refill = self._config.partial_groups == "refill"
        while index < end and (len(chosen) if refill else index - first) < self._b:
            group = self._board.groups.get(index)
            if group is None or not group.done:
                return None
            if self.usable(group):
                chosen.append(group)
            index += 1
        if index == first:
            return END
        if not chosen and refill:
            return END  # the source ended in groups that were given up
        if not chosen:
            raise JobFailedError(
                f"no group of step {self.consumed + 1} has an answer that can be trained on",
                why=f"all of {first} to {index - 1} were given up; the last cause: "
                + next((now.failure for now in self._board.groups[first].samples if now.failure), "unknown"),
            )
        return chosen, index

    def _consume(self, trainer: Identity, step: int, chosen: list[Group], after: int) -> None:
        places = [(group, sample) for group in chosen for sample in group.finished]
        for group, sample in places:
            self._board.move(group, sample, life.Consume(step))
        ids = [trajectory_id(group.index, sample) for group, sample in places]
        self.spans[step] = Span(ids, after)
        self.consumed = step
        self._board.store.put("consumption", step, str(trainer), _encode(ids), after)

    def _batch(self, step: int, *, replay: bool) -> Batch:
        trajectories = self.batch(step)
        counted = Counter(one.group for one in trajectories)
        return Batch(
            step=step,
            trajectories=trajectories,
            replay=replay,
            partial=tuple(sorted(group for group, n in counted.items() if n < self._board.samples_per_prompt)),
            omitted=tuple(index for index in range(self.after(step - 1), self.after(step)) if index not in counted),
        )

    def batch(self, step: int) -> tuple[Scored, ...]:
        """The trajectories that `step` consumed, in the order in which they were handed out."""
        if step not in self.spans:
            raise LedgerError(f"step {step} consumed no batch")
        places = [life.parse_id(name) for name in self.spans[step].ids]
        groups = self._board.groups
        if any(index not in groups for index, _ in places):
            groups = self._board.read(self.after(step - 1), self.after(step))
        return tuple(
            Scored(prompt=groups[index].prompt, **msgspec.structs.asdict(as_sample(groups[index], number)))
            for index, number in places
        )

    def commit(self, trainer: Identity, step: int) -> None:
        """See `Ledger.commit`."""
        if step > self.consumed:
            raise LedgerError(
                f"step {step} cannot be committed",
                who=trainer,
                why=f"step {self.consumed} was the last that got a batch",
                do="The durable point belongs to another run, or the ledger lost its newest writes in a power loss.",
            )
        for one in range(self.committed + 1, step + 1):
            for name in self.spans[one].ids:
                index, sample = life.parse_id(name)
                self._board.move(self._board.groups[index], sample, life.Commit())
            for index in range(self.after(one - 1), self.after(one)):
                del self._board.groups[index]
            self._board.say(events.BatchCommitted(step=one, trajectories=len(self.spans[one].ids)))
        if step > self.committed:
            self._set_committed(step)
        elif step == self.committed > 0:
            # Said again: a ledger that was killed after it had stored the commit may not have said it.
            self._board.say(events.BatchCommitted(step=step, trajectories=len(self.spans[step].ids)))

    def _set_committed(self, step: int) -> None:
        self.committed = step
        self._board.store.put("meta", "committed", step)
        self._board.changed()

    def rewind(self, trainer: Identity, step: int) -> None:
        """See `Ledger.rewind`."""
        if step < 0:
            raise LedgerError(f"there is no step {step} to go back to", who=trainer)
        if step >= self.committed:
            self.commit(trainer, step)
            return
        compacted = int(self._board.store.value("compacted", 0))
        if step < compacted:
            raise LedgerError(
                f"step {step} is too old to go back to",
                who=trainer,
                why=f"the tokens of the steps up to {compacted} were removed",
                do="Go back to a newer durable point, or begin a new run.",
            )
        again = self._board.read(self.after(step), self.after(self.committed))
        for group in again.values():
            for sample, now in enumerate(group.samples):
                if now.state is State.COMMITTED:
                    self._board.move(group, sample, life.Reopen())
        self._board.groups = again | self._board.groups
        self._set_committed(step)
        self._board.say(events.Alarm(text=f"the durable point went back from a committed step to {step}"))

    def discard(self) -> None:
        """Forgets what was consumed beyond the committed step."""
        for step in [step for step in self.spans if step > self.committed]:
            del self.spans[step]
            self._board.store.delete("consumption", step)
        self.consumed = self.committed

    def compact(self, step: int) -> int:
        """Removes the tokens of the steps up to `step`. Returns how many steps that were."""
        store = self._board.store
        before = int(store.value("compacted", 0))
        step = min(step, self.committed)
        if step <= before:
            return 0
        store.delete_below("segments", self.after(step))
        store.delete_below("attempts", self.after(step))
        store.put("meta", "compacted", step)
        return step - before
