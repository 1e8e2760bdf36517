"""The groups that are not committed yet: in memory, where all is decided, and on the store behind it.

Leases and the frontier both change groups, and do it here: `move` is the one way to a trajectory's choke point, and
each change is put on the store with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from robustrl import events
from robustrl.errors import LedgerError
from robustrl.persist import trajectory as life
from robustrl.persist.records import Prompt, Sample, Segment
from robustrl.persist.store import Store
from robustrl.persist.trajectory import DONE, SETTLED, State, Trajectory, advance, trajectory_id
from robustrl.roles import Identity

_encode = msgspec.msgpack.Encoder().encode
_decode_prompt = msgspec.msgpack.Decoder(Prompt).decode


@dataclass
class Group:
    """The n samples of one prompt."""

    index: int
    prompt: Prompt
    attempt: int = 0
    owner: Identity | None = None
    """Who holds the lease, or held it when the last sample was finished."""
    request: str = ""
    barren: int = 0
    """Attempts in a row that ended without a token or an answer more."""
    samples: list[Trajectory] = field(default_factory=list)
    segments: list[list[Segment]] = field(default_factory=list)
    gained: bool = True
    """Whether the attempt under way has brought anything. Not stored: a restart gives it the benefit of the doubt."""
    heard: float = 0.0
    """When its owner was last heard of it. Not stored."""

    @property
    def done(self) -> bool:
        """Nobody generates for it any more."""
        return all(sample.state in SETTLED for sample in self.samples)

    @property
    def whole(self) -> bool:
        return all(sample.state in DONE for sample in self.samples)

    @property
    def finished(self) -> list[int]:
        """The samples that have an answer."""
        return [number for number, sample in enumerate(self.samples) if sample.state in DONE]

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)


class Board:
    """Groups by their number.

    Args:
        store: their tables.
        samples_per_prompt: n, the size of a group.
        wall: wall time in seconds, for the record only.
        emit: takes what has to be said at once; `say` keeps what is to be said once it is stored.
    """

    def __init__(self, store: Store, samples_per_prompt: int, wall: Callable[[], float], emit: events.Emit) -> None:
        self.store = store
        self.samples_per_prompt = samples_per_prompt
        self.emit = emit
        self.groups: dict[int, Group] = {}
        self.free: set[int] = set()
        """Groups that wait for an owner."""
        self.unsaid: list[events.Event] = []
        self.counts: Counter[str] = Counter()
        self.revision = 0
        """Grows with each change that somebody may wait for."""
        self._wall = wall

    def load(self, low: int, now: float) -> None:
        """Takes up what the store has from group `low` on."""
        self.groups = self.read(low)
        self.free = {group.index for group in self.groups.values() if group.owner is None and not group.done}
        for group in self.groups.values():
            group.heard = now

    def say(self, event: events.Event) -> None:
        """Emits an event after the next flush."""
        self.unsaid.append(event)

    def changed(self) -> None:
        self.revision += 1

    # -- changes ---------------------------------------------------------------------------------------------------

    def add(self, index: int, prompt: Prompt) -> Group:
        group = Group(index, prompt)
        for sample in range(self.samples_per_prompt):
            group.samples.append(Trajectory(trajectory_id(index, sample)))
            group.segments.append([])
            self.put_sample(group, sample)
        self.groups[index] = group
        self.put_group(group)
        self.free.add(index)
        return group

    def move(self, group: Group, sample: int, move: life.Move) -> bool:
        """Moves one sample through the choke point. False: the move had been made before."""
        before = group.samples[sample]
        after = advance(before, move)
        if after is before:
            return False
        group.samples[sample] = after
        if not isinstance(move, life.Append):
            self.put_sample(group, sample)
        return True

    def release(self, group: Group, outcome: str, detail: str) -> None:
        """The lease of `group` ends; what is saved of it stays."""
        assert group.owner is not None
        for sample, now in enumerate(group.samples):
            if now.state is State.LEASED:
                self.move(group, sample, life.Release())
        self.put_attempt(group, group.owner, outcome, detail)
        group.owner, group.request = None, ""
        self.put_group(group)
        self.free.add(group.index)
        self.changed()

    def drop_tokens(self, group: Group, sample: int) -> None:
        group.segments[sample] = []
        self.store.delete("segments", group.index, sample)

    # -- rows ------------------------------------------------------------------------------------------------------

    def put_group(self, group: Group) -> None:
        owner = str(group.owner) if group.owner else None
        self.store.put("groups", group.index, _encode(group.prompt), group.attempt, owner, group.request, group.barren)

    def put_sample(self, group: Group, sample: int) -> None:
        now = group.samples[sample]
        self.store.put(
            "samples",
            group.index,
            sample,
            now.state.value,
            now.attempt,
            str(now.owner) if now.owner else None,
            now.reward,
            now.finish_reason,
            now.step,
            now.failure,
        )

    def put_segment(self, group: int, sample: int, segment: Segment) -> None:
        self.store.put(
            "segments",
            group,
            sample,
            segment.start,
            segment.ids,
            segment.logprobs,
            segment.version,
            segment.owner,
            int(segment.trained),
            segment.sampling,
            segment.state,
        )

    def put_attempt(self, group: Group, owner: Identity, outcome: str, detail: str = "") -> None:
        self.store.put("attempts", group.index, group.attempt, str(owner), self._wall(), group.tokens, outcome, detail)

    def read(self, low: int, high: int | None = None) -> dict[int, Group]:
        """Groups low <= index < high from the store. A segment that the disk damaged costs the tokens from there on.

        Raises LedgerError when rows are damaged that cannot be made again.
        """
        where, params = ("grp >= ?", [low]) if high is None else ("grp >= ? AND grp < ?", [low, high])
        groups: dict[int, Group] = {}
        for index, prompt, attempt, owner, request, barren in self.store.rows("groups", where, *params):
            group = groups[index] = Group(
                index, _decode_prompt(prompt), attempt, Identity.parse(owner) if owner else None, request, barren
            )
            for sample in range(self.samples_per_prompt):
                group.samples.append(Trajectory(trajectory_id(index, sample)))
                group.segments.append([])
        for index, sample, start, ids, logprobs, version, owner, trained, sampling, state in self.store.rows(
            "segments", where, *params
        ):
            if index not in groups:
                continue  # its group's row is damaged, which is refused below
            segments = groups[index].segments[sample]
            if start == sum(map(len, segments)):
                segments.append(Segment(start, ids, logprobs, version, owner, bool(trained), sampling, state))
        for index, sample, state, attempt, owner, reward, reason, step, failure in self.store.rows(
            "samples", where, *params
        ):
            if index not in groups:
                continue
            group = groups[index]
            group.samples[sample] = Trajectory(
                trajectory_id(index, sample),
                State(state),
                attempt,
                Identity.parse(owner) if owner else None,
                sum(map(len, group.segments[sample])),
                reward,
                reason,
                step,
                failure,
            )
        self._mend(groups)
        if self.store.damaged:
            found, self.store.damaged = self.store.damaged, []
            raise LedgerError(
                f"the ledger {self.store.path} has {len(found)} damaged rows",
                why=", ".join(f"{table} {key}" for table, key in found[:5]),
                do="The disk changed what was written; restore the file or begin a new run.",
            )
        return groups

    def _mend(self, groups: dict[int, Group]) -> None:
        """Answers that lost a damaged segment are generated again from there; what was trained on cannot be."""
        damaged = [(table, key) for table, key in self.store.damaged if table == "segments"]
        if not damaged:
            return
        for index, sample in sorted({(int(str(key[0])), int(str(key[1]))) for _, key in damaged}):
            group = groups.get(index)
            if group is None:
                continue
            now = group.samples[sample]
            if now.step:
                continue  # stays in `damaged`: a batch that was trained on cannot be replayed without it
            self.store.damaged = [
                (table, key) for table, key in self.store.damaged if (table, key[:2]) != ("segments", (index, sample))
            ]
            kept = group.segments[sample]
            self.store.delete("segments", index, sample)
            for segment in kept:
                self.put_segment(index, sample, segment)
            # Not a move of the state machine but a repair of its record: the answer was never whole on this disk.
            group.samples[sample] = Trajectory(now.id, attempt=now.attempt, tokens=sum(map(len, kept)))
            group.owner = None
            for number, other in enumerate(group.samples):
                if other.state is State.LEASED:
                    group.samples[number] = advance(other, life.Release())
                self.put_sample(group, number)
            self.put_group(group)
        self.emit(events.Alarm(text=f"the ledger lost {len(damaged)} damaged token segments; they are generated again"))


def as_sample(group: Group, number: int) -> Sample:
    """One answer of a group as its readers get it."""
    now = group.samples[number]
    return Sample(
        group=group.index,
        sample=number,
        segments=joined(group.segments[number]),
        finished=now.state in DONE,
        reward=now.reward,
        finish_reason=now.finish_reason,
    )


def joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Neighbours that only differ in their tokens become one segment: many small appends are one to the reader. State
    ends a segment: it is the state after its last token."""
    runs: list[list[Segment]] = []
    for segment in segments:
        if runs and not runs[-1][-1].state and runs[-1][0].alike(segment):
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return tuple(
        msgspec.structs.replace(
            run[0],
            ids=b"".join(one.ids for one in run),
            logprobs=b"".join(one.logprobs for one in run),
            state=run[-1].state,
        )
        for run in runs
    )
