"""The trajectory ledger: which answer is whose, what of it is saved, and which optimizer step trained on it.

A synchronous core: one thread calls it, nothing in it waits. Memory holds all that is not committed and decides;
the store is written behind it in one transaction a call, or a group of calls inside `deferred`. What a caller was
told is on the store; events are emitted after that.

Steps count from 1, as in `StepDone`: the batch of step t is made of prompts (t-1)B .. tB-1 in the order of the prompt
source. Weight steps count from 0 (the initial weights), so step t trains the weights of step t-1, and its tokens may
come from weights of step t-1-s at the oldest.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from robustrl import events
from robustrl.config import PersistConfig
from robustrl.errors import ConfigError, FencedError, IllegalMoveError, LedgerError, StorageError, WriterFencedError
from robustrl.persist import trajectory as life
from robustrl.persist.records import (
    END,
    ITEM,
    RESTART,
    AppendOp,
    Audit,
    Batch,
    End,
    FailOp,
    FinishOp,
    LeaseGrant,
    Op,
    Outcome,
    Prompt,
    Rewound,
    Sample,
    Scored,
    Segment,
    pack_ids,
    pack_logprobs,
)
from robustrl.persist.store import Store
from robustrl.persist.trajectory import DONE, State, Trajectory, advance, trajectory_id
from robustrl.roles import Identity, Member

Prompts = Callable[[int], "Prompt | None"] | Sequence[Prompt]
"""The prompt source: prompt number -> prompt, None after the last. The same number always gives the same prompt."""

_encode = msgspec.msgpack.Encoder().encode
_decode_prompt = msgspec.msgpack.Decoder(Prompt).decode
_decode_ids = msgspec.msgpack.Decoder(list[str]).decode


@dataclass
class _Group:
    """The n samples of one prompt, in memory while they are not committed."""

    index: int
    prompt: Prompt
    attempt: int = 0
    owner: Identity | None = None
    """Who holds the lease, or held it when the last sample was finished."""
    request: str = ""
    samples: list[Trajectory] = field(default_factory=list)
    segments: list[list[Segment]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return all(sample.state in DONE for sample in self.samples)

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)


class Ledger:
    """The ledger of one job.

    Args:
        store: its tables. What an earlier ledger process left there is taken up again.
        prompts: the prompt source.
        groups_per_batch: B, prompts a step.
        samples_per_prompt: n, answers a prompt (the group).
        total_steps: optimizer steps of the job; no group beyond the last batch is handed out.
        config: staleness, exactness, the longest streak of failures.
        clock: wall time in seconds, for the record only.
        emit: takes events.

    Raises:
        LedgerError: the store cannot be read, or belongs to a job with other batches.
    """

    def __init__(
        self,
        store: Store,
        prompts: Prompts,
        *,
        groups_per_batch: int,
        samples_per_prompt: int,
        total_steps: int,
        config: PersistConfig | None = None,
        clock: Callable[[], float] = time.time,
        emit: events.Emit = events.ignore,
    ) -> None:
        if groups_per_batch < 1 or samples_per_prompt < 1 or total_steps < 1:
            raise ConfigError(
                "a ledger needs at least one prompt a batch, one sample a prompt and one step",
                why=f"{groups_per_batch} prompts, {samples_per_prompt} samples, {total_steps} steps",
            )
        self._store = store
        self._prompts = prompts
        self.groups_per_batch = groups_per_batch
        self.samples_per_prompt = samples_per_prompt
        self.total_steps = total_steps
        self.config = config or PersistConfig()
        self._clock = clock
        self._emit = emit
        self._deferred = 0
        self._events: list[events.Event] = []
        self._counts: Counter[str] = Counter()
        self._told_end: set[Identity] = set()
        self._streak = 0
        self._first_cause = ""
        self.exhausted: str | None = None
        """The first cause of the streak of failures that is longer than allowed; nothing is handed out after it."""
        self.revision = 0
        """Grows with each change that somebody may wait for."""
        self._stale = False
        self._load()

    # -- the store behind ------------------------------------------------------------------------------------------

    def _load(self) -> None:
        meta = dict(self._store.rows("meta"))
        for name, value in (
            ("groups_per_batch", self.groups_per_batch),
            ("samples_per_prompt", self.samples_per_prompt),
        ):
            if meta.get(name, value) != value:
                raise LedgerError(
                    f"the ledger {self._store.path} belongs to another job",
                    why=f"its {name} is {meta[name]}, this job's is {value}",
                    do="Go on with the old values, or use a new folder.",
                )
            if name not in meta:
                self._store.put("meta", name, value)
        self.committed = int(meta.get("committed", 0))
        """Newest step with a durable point; 0 before the first."""
        self._source_end: int | None = meta.get("source_end")
        self._fences = {Member.parse(name): int(number) for name, number in self._store.rows("fences")}
        self._kept = {Identity.parse(name): int(tokens) for name, tokens in self._store.rows("owners")}
        self._consumed = {int(step): _decode_ids(ids) for step, _, ids in self._store.rows("consumption")}
        self.consumed = max(self._consumed, default=0)
        """Newest step whose batch was handed to the optimizer."""
        self._groups: dict[int, _Group] = self._read_groups(self.committed * self.groups_per_batch)
        self._next = max(self._groups, default=self.committed * self.groups_per_batch - 1) + 1
        self._free = {group.index for group in self._groups.values() if group.owner is None and not group.done}
        self._stale = False
        self._store.flush()

    def _read_groups(self, low: int, high: int | None = None) -> dict[int, _Group]:
        """Groups low <= index < high from the store. A segment that the disk damaged costs the tokens from there on."""
        where, params = ("grp >= ?", [low]) if high is None else ("grp >= ? AND grp < ?", [low, high])
        groups: dict[int, _Group] = {}
        for index, prompt, attempt, owner, request in self._store.rows("groups", where, *params):
            group = groups[index] = _Group(
                index, _decode_prompt(prompt), attempt, Identity.parse(owner) if owner else None, request
            )
            for sample in range(self.samples_per_prompt):
                group.samples.append(Trajectory(trajectory_id(index, sample)))
                group.segments.append([])
        for index, sample, start, ids, logprobs, version, owner in self._store.rows("segments", where, *params):
            if index not in groups:
                continue  # its group's row is damaged, which is refused below
            segments = groups[index].segments[sample]
            if start == sum(map(len, segments)):
                segments.append(Segment(start, ids, logprobs, version, owner))
        for index, sample, state, attempt, owner, reward, reason, step, failure in self._store.rows(
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
        if self._store.damaged:
            found, self._store.damaged = self._store.damaged, []
            raise LedgerError(
                f"the ledger {self._store.path} has {len(found)} damaged rows",
                why=", ".join(f"{table} {key}" for table, key in found[:5]),
                do="The disk changed what was written; restore the file or begin a new run.",
            )
        return groups

    def _mend(self, groups: dict[int, _Group]) -> None:
        """Answers that lost a damaged segment are generated again from there; what was trained on cannot be."""
        damaged = [(table, key) for table, key in self._store.damaged if table == "segments"]
        if not damaged:
            return
        for index, sample in sorted({(int(str(key[0])), int(str(key[1]))) for _, key in damaged}):
            group = groups.get(index)
            if group is None:
                continue
            now = group.samples[sample]
            if now.step:
                continue  # stays in `damaged`: a batch that was trained on cannot be replayed without it
            self._store.damaged = [
                (table, key) for table, key in self._store.damaged if (table, key[:2]) != ("segments", (index, sample))
            ]
            kept = group.segments[sample]
            self._store.delete("segments", index, sample)
            for segment in kept:
                self._put_segment(index, sample, segment)
            # Not a move of the state machine but a repair of its record: the answer was never whole on this disk.
            group.samples[sample] = Trajectory(now.id, attempt=now.attempt, tokens=sum(map(len, kept)))
            group.owner = None
            for number, other in enumerate(group.samples):
                if other.state is State.LEASED:
                    group.samples[number] = advance(other, life.Release())
                self._put_sample(group, number)
            self._put_group(group)
        self._emit(
            events.Alarm(text=f"the ledger lost {len(damaged)} damaged token segments; they are generated again")
        )

    def flush(self) -> None:
        """Makes everything durable that was done since the last flush, then emits its events."""
        self._flush()

    def _flush(self, *, sync: bool = False) -> None:
        try:
            self._store.flush(sync=sync)
        except (StorageError, WriterFencedError):
            self._events.clear()
            self._store.forget_pending()
            self._stale = True  # memory must not know more than the store: nobody was told of the difference
            with contextlib.suppress(LedgerError, WriterFencedError):
                self._load()
            self.revision += 1
            raise
        ready, self._events = self._events, []
        for event in ready:
            self._emit(event)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Calls inside are made durable together, by a later `flush`: answer nobody before that."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1

    def _done(self) -> None:
        if not self._deferred:
            self._flush()

    def _changed(self) -> None:
        self.revision += 1

    def _put_group(self, group: _Group) -> None:
        self._store.put(
            "groups",
            group.index,
            _encode(group.prompt),
            group.attempt,
            str(group.owner) if group.owner else None,
            group.request,
        )

    def _put_sample(self, group: _Group, sample: int) -> None:
        now = group.samples[sample]
        self._store.put(
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

    def _put_segment(self, group: int, sample: int, segment: Segment) -> None:
        self._store.put(
            "segments",
            group,
            sample,
            segment.start,
            segment.ids,
            segment.logprobs,
            segment.version,
            segment.owner,
        )

    def _put_attempt(self, group: _Group, owner: Identity, outcome: str, detail: str = "") -> None:
        self._store.put(
            "attempts", group.index, group.attempt, str(owner), self._clock(), group.tokens, outcome, detail
        )

    def _move(self, group: _Group, sample: int, move: life.Move) -> bool:
        """Moves one sample through the choke point. False: the move had been made before."""
        before = group.samples[sample]
        after = advance(before, move)
        if after is before:
            return False
        group.samples[sample] = after
        if not isinstance(move, life.Append):
            self._put_sample(group, sample)
        return True

    # -- who speaks ------------------------------------------------------------------------------------------------

    def _hear(self, speaker: Identity) -> None:
        """Refuses an older incarnation; a newer one fences its predecessors by speaking."""
        if self._stale:
            self._load()
        fence = self._fences.get(speaker.member, 0)
        if speaker.incarnation < fence:
            self._counts["fenced"] += 1
            self._emit(events.Refused(what="a word to the ledger", identity=str(speaker), why=f"#{fence} took over"))
            raise FencedError(
                "the ledger does not listen to this incarnation any more",
                who=speaker,
                why=f"{speaker.member}#{fence} took over",
                do="It must end itself.",
            )
        if speaker.incarnation > fence:
            self._fence(speaker.member, speaker.incarnation)

    def release_owner(self, member: Member, below_incarnation: int) -> int:
        """Incarnations of `member` below this one are gone: their leases end, whatever they still say is refused.

        Returns how many groups wait for a new owner because of that. Calling it again changes nothing.
        """
        released = 0
        if below_incarnation > self._fences.get(member, 0):
            released = self._fence(member, below_incarnation)
        self._done()
        return released

    fence = release_owner

    def _fence(self, member: Member, below: int) -> int:
        before = self._fences.get(member, 0)
        self._fences[member] = below
        self._store.put("fences", str(member), below)
        released = 0
        for group in self._groups.values():
            owner = group.owner
            if owner is not None and owner.member == member and owner.incarnation < below and not group.done:
                self._release(group, "released", "its owner is gone")
                released += 1
        for owner, tokens in self._kept.items():
            if owner.member == member and before <= owner.incarnation < below and owner not in self._told_end:
                self._events.append(events.TokensKept(owner=str(owner), tokens=tokens))
        self._changed()
        return released

    def _release(self, group: _Group, outcome: str, detail: str) -> None:
        assert group.owner is not None
        for sample, now in enumerate(group.samples):
            if now.state is State.LEASED:
                self._move(group, sample, life.Release())
        self._put_attempt(group, group.owner, outcome, detail)
        group.owner, group.request = None, ""
        self._put_group(group)
        self._free.add(group.index)
        self._changed()

    # -- rollouts --------------------------------------------------------------------------------------------------

    def _end(self) -> int:
        """The first group number that the run does not reach."""
        planned = self.total_steps * self.groups_per_batch
        return planned if self._source_end is None else min(planned, self._source_end)

    def _prompt(self, index: int) -> Prompt | None:
        if callable(self._prompts):
            return self._prompts(index)
        return self._prompts[index] if index < len(self._prompts) else None

    def lease(self, owner: Identity, held_steps: Sequence[int], request: str = "") -> LeaseGrant | End | None:
        """Hands out the lowest group that nobody holds, with everything that is saved of it.

        Args:
            owner: who asks.
            held_steps: weight steps that it holds; 0 are the initial weights.
            request: names the asking. The same request again (its answer was lost) gets the same group again.

        Returns:
            A grant; None when there is nothing now (staleness, or others' leases that may come back); END when every
            group of the run is finished.
        """
        self._hear(owner)
        grant = self._lease(owner, held_steps, request)
        self._done()
        return grant

    def _lease(self, owner: Identity, held_steps: Sequence[int], request: str) -> LeaseGrant | End | None:
        if request:
            for group in self._groups.values():
                if group.owner == owner and group.request == request and not group.done:
                    return self._grant(group)
        if self.exhausted is not None:
            return None
        index = min(self._free, default=self._next)
        if index < self._end():
            required = max(0, index // self.groups_per_batch - self.config.staleness)
            if max(held_steps, default=-1) < required:
                return None
            if index == self._next:
                self._issue()
        if index >= self._end():
            if not all(group.done for group in self._groups.values()):
                return None
            if owner not in self._told_end:
                self._told_end.add(owner)
                self._events.append(events.TokensKept(owner=str(owner), tokens=self._kept.get(owner, 0)))
            return END
        group = self._groups[index]
        self._free.discard(index)
        group.attempt += 1
        group.owner, group.request = owner, request
        for sample, now in enumerate(group.samples):
            if now.state not in DONE:
                self._move(group, sample, life.Lease(owner, group.attempt))
        self._put_group(group)
        self._put_attempt(group, owner, "open")
        saved = sum(sample.tokens for sample in group.samples)
        self._events.append(events.Leased(group=index, owner=str(owner), saved_tokens=saved))
        return self._grant(group)

    def _issue(self) -> None:
        """Takes the next prompt from the source, or learns that it has ended."""
        index = self._next
        prompt = self._prompt(index)
        if prompt is None:
            self._source_end = index
            self._store.put("meta", "source_end", index)
            self._changed()
            return
        group = _Group(index, prompt)
        for sample in range(self.samples_per_prompt):
            group.samples.append(Trajectory(trajectory_id(index, sample)))
            group.segments.append([])
            self._put_sample(group, sample)
        self._groups[index] = group
        self._put_group(group)
        self._free.add(index)
        self._next += 1
        self._counts["issued"] += 1

    def _grant(self, group: _Group) -> LeaseGrant:
        required = max(0, group.index // self.groups_per_batch - self.config.staleness)
        return LeaseGrant(
            group=group.index,
            attempt=group.attempt,
            prompt=group.prompt,
            samples=tuple(
                Sample(
                    group=group.index,
                    sample=sample,
                    segments=_joined(group.segments[sample]),
                    finished=now.state in DONE,
                    reward=now.reward,
                    finish_reason=now.finish_reason,
                )
                for sample, now in enumerate(group.samples)
            ),
            required_step=required if self.config.exact_staleness else None,
        )

    def append(
        self,
        owner: Identity,
        group: int,
        sample: int,
        *,
        attempt: int,
        start: int,
        ids: Sequence[int],
        logprobs: Sequence[float],
        version: str,
    ) -> Outcome:
        """Keeps tokens `start` .. `start + len(ids)` of an answer, made by weight version `version`.

        Delivered again they must be what they were, and change nothing.

        Raises:
            FencedError: the owner's incarnation was replaced.
            LedgerError: there is a gap before `start`, or saved tokens are contradicted.
        """
        return self.apply(
            owner,
            AppendOp(
                group=group,
                attempt=attempt,
                sample=sample,
                start=start,
                ids=pack_ids(ids),
                logprobs=pack_logprobs(logprobs),
                version=version,
            ),
        )

    def finish(
        self,
        owner: Identity,
        group: int,
        sample: int,
        *,
        attempt: int,
        tokens: int,
        reward: float,
        finish_reason: str = "",
    ) -> Outcome:
        """The answer is whole, `tokens` long, and worth `reward`.

        Raises:
            FencedError: the owner's incarnation was replaced.
            LedgerError: fewer tokens are saved than the answer has, or the reward is not a number.
        """
        return self.apply(
            owner,
            FinishOp(group=group, attempt=attempt, sample=sample, tokens=tokens, reward=reward, reason=finish_reason),
        )

    def fail(
        self, owner: Identity, group: int, sample: int | None, *, attempt: int, kind: str, detail: str = ""
    ) -> Outcome:
        """The attempt ended in an infrastructure failure: never a reward, the group waits for another attempt.

        Saved tokens stay, unless `kind` is ``restart``. `sample` None means all that are not finished.
        """
        return self.apply(owner, FailOp(group=group, attempt=attempt, sample=sample, kind=kind, detail=detail))

    def apply(self, owner: Identity, op: Op) -> Outcome:
        """What `append`, `finish` and `fail` do, for a word as it travels."""
        self._hear(owner)
        group = self._groups.get(op.group)
        if group is None and 0 <= op.group < self.committed * self.groups_per_batch:
            # Committed long ago: whatever this is, it is late.
            outcome = self._superseded(owner, op, "its group is committed")
        elif group is None:
            raise LedgerError(f"group {op.group} was never handed out", who=owner)
        elif op.sample is not None and not 0 <= op.sample < self.samples_per_prompt:
            raise LedgerError(
                f"group {op.group} has no sample {op.sample}", who=owner, why=f"it has {self.samples_per_prompt}"
            )
        elif group.owner != owner or group.attempt != op.attempt:
            holder = f"attempt {group.attempt}, held by {group.owner}" if group.owner else "held by nobody"
            outcome = self._superseded(owner, op, f"it is {holder}")
        else:
            match op:
                case AppendOp():
                    outcome = self._append(owner, group, op)
                case FinishOp():
                    outcome = self._finish(owner, group, op)
                case FailOp():
                    outcome = self._fail(owner, group, op)
        self._done()
        return outcome

    def _superseded(self, owner: Identity, op: Op, why: str) -> Outcome:
        self._counts["superseded"] += 1
        name = str(op.group) if op.sample is None else trajectory_id(op.group, op.sample)
        what = {AppendOp: "tokens", FinishOp: "an answer", FailOp: "a failure"}[type(op)]
        self._emit(events.Refused(what=f"{what} of {name}, attempt {op.attempt}", identity=str(owner), why=why))
        return Outcome.SUPERSEDED

    def _append(self, owner: Identity, group: _Group, op: AppendOp) -> Outcome:
        count = len(op.ids) // ITEM
        now = group.samples[op.sample]
        if len(op.ids) % ITEM or len(op.ids) != len(op.logprobs):
            raise LedgerError(
                f"tokens of {now.id} and their log-probabilities do not match",
                who=owner,
                why=f"{len(op.ids)} and {len(op.logprobs)} bytes",
            )
        if not 0 <= op.start <= now.tokens:
            raise LedgerError(
                f"tokens of {now.id} are missing", who=owner, why=f"{now.tokens} are saved, these start at {op.start}"
            )
        known = min(now.tokens - op.start, count)
        if known and not _same(group.segments[op.sample], op, known):
            raise LedgerError(
                f"tokens {op.start} to {op.start + known} of {now.id} contradict the saved ones",
                who=owner,
                do="A token that is saved is never generated again: continue after the saved ones.",
            )
        if known == count:
            self._counts["duplicate_appends"] += 1
            return Outcome.DUPLICATE
        start = op.start + known
        try:
            self._move(group, op.sample, life.Append(owner, op.attempt, start, count - known))
        except IllegalMoveError as error:
            raise LedgerError(error.what, who=owner, why=error.why) from error
        segment = Segment(start, op.ids[known * ITEM :], op.logprobs[known * ITEM :], op.version, str(owner))
        group.segments[op.sample].append(segment)
        self._put_segment(group.index, op.sample, segment)
        self._kept[owner] = self._kept.get(owner, 0) + count - known
        self._store.put("owners", str(owner), self._kept[owner])
        return Outcome.ACCEPTED

    def _finish(self, owner: Identity, group: _Group, op: FinishOp) -> Outcome:
        now = group.samples[op.sample]
        if not math.isfinite(op.reward):
            raise LedgerError(
                f"the reward of {now.id} is {op.reward}", who=owner, do="Report a failure instead: it is not a reward."
            )
        try:
            moved = self._move(group, op.sample, life.Finish(owner, op.attempt, op.tokens, float(op.reward), op.reason))
        except IllegalMoveError as error:
            raise LedgerError(error.what, who=owner, why=error.why) from error
        if not moved:
            self._counts["duplicate_finishes"] += 1
            return Outcome.DUPLICATE
        self._streak, self._first_cause = 0, ""
        if group.done:
            self._put_attempt(group, owner, "finished")
        self._changed()
        return Outcome.ACCEPTED

    def _fail(self, owner: Identity, group: _Group, op: FailOp) -> Outcome:
        struck = [
            sample
            for sample, now in enumerate(group.samples)
            if now.state is State.LEASED and op.sample in (None, sample)
        ]
        if not struck:
            self._counts["duplicate_failures"] += 1
            return Outcome.DUPLICATE
        dropped = 0
        for sample in struck:
            tokens = group.samples[sample].tokens
            self._move(group, sample, life.Fail(owner, op.attempt, op.kind, op.kind != RESTART))
            if op.kind == RESTART and tokens:
                dropped += tokens
                self._drop_tokens(group, sample)
        if dropped:
            self._events.append(events.TokensDropped(tokens=dropped, why=f"restart: {op.detail}"))
        self._release(group, f"failed: {op.kind}", op.detail)
        self._counts["failures"] += 1
        self._streak += 1
        if self._streak == 1:
            self._first_cause = f"{op.kind} of group {group.index} at {owner}: {op.detail}"
        if self._streak > self.config.max_failure_streak and self.exhausted is None:
            self.exhausted = self._first_cause
        return Outcome.ACCEPTED

    def _drop_tokens(self, group: _Group, sample: int) -> None:
        group.segments[sample] = []
        self._store.delete("segments", group.index, sample)

    # -- the trainer -----------------------------------------------------------------------------------------------

    def next_batch(self, trainer: Identity, step: int) -> Batch | End | None:
        """The batch of optimizer step `step` (from 1), marked as consumed by it before this returns.

        A step that consumed its batch before (the trainer went back) is given the very same one, `replay` set.

        Returns:
            The batch; None while its groups are not all finished; END beyond the last step.

        Raises:
            FencedError: the trainer's incarnation was replaced.
            LedgerError: a step was skipped.
        """
        self._hear(trainer)
        batch = self._next_batch(trainer, step)
        self._done()
        return batch

    def _next_batch(self, trainer: Identity, step: int) -> Batch | End | None:
        if not 1 <= step <= self.consumed + 1:
            raise LedgerError(
                f"step {step} cannot have a batch now",
                who=trainer,
                why=f"step {self.consumed} was the last that got one",
                do="Steps follow on each other from 1; after going back call rewind.",
            )
        if step <= self.consumed:
            batch = Batch(step=step, trajectories=self.batch(step), replay=True)
            self._counts["replayed"] += 1
        else:
            span = range((step - 1) * self.groups_per_batch, min(step * self.groups_per_batch, self._end()))
            if not span:
                return END
            if not all(index in self._groups and self._groups[index].done for index in span):
                return None
            for index in span:
                for sample in range(self.samples_per_prompt):
                    self._move(self._groups[index], sample, life.Consume(step))
            ids = [trajectory_id(index, sample) for index in span for sample in range(self.samples_per_prompt)]
            self._consumed[step] = ids
            self.consumed = step
            self._store.put("consumption", step, str(trainer), _encode(ids))
            batch = Batch(step=step, trajectories=self.batch(step))
        self._events.append(
            events.BatchConsumed(
                step=step,
                incarnation=trainer.incarnation,
                trajectories=tuple(one.id for one in batch.trajectories),
                replay=batch.replay,
            )
        )
        return batch

    def batch(self, step: int) -> tuple[Scored, ...]:
        """The trajectories that `step` consumed, in the order in which they were handed out."""
        if step not in self._consumed:
            raise LedgerError(f"step {step} consumed no batch")
        places = [life.parse_id(name) for name in self._consumed[step]]
        groups = self._groups
        if any(index not in groups for index, _ in places):
            groups = self._read_groups(min(places)[0], max(places)[0] + 1)
        return tuple(
            Scored(
                group=index,
                sample=sample,
                segments=_joined(groups[index].segments[sample]),
                finished=True,
                reward=groups[index].samples[sample].reward,
                finish_reason=groups[index].samples[sample].finish_reason,
                prompt=groups[index].prompt,
            )
            for index, sample in places
        )

    def commit(self, trainer: Identity, step: int) -> None:
        """The durable point of `step` exists: the batches up to it are done with. Lower steps again change nothing.

        Raises:
            FencedError: the trainer's incarnation was replaced.
            LedgerError: `step` has not consumed its batch.
        """
        self._hear(trainer)
        self._commit(trainer, step)
        if self._deferred:
            return
        self._flush(sync=True)

    def _commit(self, trainer: Identity, step: int) -> None:
        if step > self.consumed:
            raise LedgerError(
                f"step {step} cannot be committed",
                who=trainer,
                why=f"step {self.consumed} was the last that got a batch",
                do="The durable point belongs to another run, or the ledger lost its newest writes in a power loss.",
            )
        for one in range(self.committed + 1, step + 1):
            for name in self._consumed[one]:
                index, sample = life.parse_id(name)
                self._move(self._groups[index], sample, life.Commit())
            for index in {life.parse_id(name)[0] for name in self._consumed[one]}:
                del self._groups[index]
            self._events.append(events.BatchCommitted(step=one, trajectories=len(self._consumed[one])))
        if step > self.committed:
            self._set_committed(step)
        elif step == self.committed > 0:
            # Said again: a ledger that was killed after it had stored the commit may not have said it.
            self._events.append(events.BatchCommitted(step=step, trajectories=len(self._consumed.get(step, ()))))

    def _set_committed(self, step: int) -> None:
        self.committed = step
        self._store.put("meta", "committed", step)
        self._changed()

    def rewind(self, trainer: Identity, step: int) -> Rewound:
        """The trainer came back at the durable point of `step` (0: from the start); it asks for step + 1 next.

        That the point exists commits the steps up to it. A point older than the newest committed one (which turned
        out unreadable) opens the steps after it again.

        Raises:
            FencedError: the trainer's incarnation was replaced.
            LedgerError: `step` has not consumed its batch.
        """
        self._hear(trainer)
        if step < 0:
            raise LedgerError(f"there is no step {step} to go back to", who=trainer)
        if step >= self.committed:
            self._commit(trainer, step)
        else:
            low, high = step * self.groups_per_batch, self.committed * self.groups_per_batch
            again = self._read_groups(low, high)
            for group in again.values():
                for sample in range(self.samples_per_prompt):
                    self._move(group, sample, life.Reopen())
            self._groups = again | self._groups
            self._set_committed(step)
            self._events.append(events.Alarm(text=f"the durable point went back from a committed step to {step}"))
        if not self._deferred:
            self._flush(sync=True)
        return Rewound(committed=self.committed, consumed=self.consumed)

    def discard_uncommitted(self, why: str = "whole-job restart", *, by: Identity | None = None) -> int:
        """Forgets everything beyond the committed frontier, as a job without a ledger does. Returns the tokens lost.

        Leases end; the groups are handed out again from their first token. `by` is who asks, where it can be fenced.
        """
        if by is not None:
            self._hear(by)
        dropped = 0
        for group in self._groups.values():
            dropped += group.tokens
            if group.owner is not None and not group.done:
                self._put_attempt(group, group.owner, "discarded", why)
            for sample in range(self.samples_per_prompt):
                self._drop_tokens(group, sample)
                self._move(group, sample, life.Discard())
            group.owner, group.request = None, ""
            self._put_group(group)
            self._free.add(group.index)
        for step in [step for step in self._consumed if step > self.committed]:
            del self._consumed[step]
            self._store.delete("consumption", step)
        self.consumed = self.committed
        self._told_end.clear()
        self._events.append(events.TokensDropped(tokens=dropped, why=why))
        self._changed()
        self._done()
        return dropped

    # -- looking back ----------------------------------------------------------------------------------------------

    def audit(self, total_steps: int) -> Audit:
        """Counts the run from the store: each trajectory of steps 1 .. total_steps must be in one committed step."""
        self._flush()
        end = min(total_steps * self.groups_per_batch, self._end())
        n = self.samples_per_prompt
        expected = [trajectory_id(index, sample) for index in range(end) for sample in range(n)]
        seen: Counter[str] = Counter()
        foreign: list[str] = []
        steps = committed = 0
        for step, _, packed in self._store.rows("consumption", "step <= ?", self.committed):
            names = _decode_ids(packed)
            steps += 1
            committed += len(names)
            seen.update(names)
            foreign += [name for name in names if life.parse_id(name)[0] // self.groups_per_batch != step - 1]
        whole = {
            trajectory_id(index, sample)
            for index, sample, state, *_ in self._store.rows("samples", "grp < ?", end)
            if state == State.COMMITTED
        }
        return Audit(
            committed=committed,
            steps=steps,
            lost=tuple(name for name in expected if name not in seen or name not in whole),
            duplicated=tuple(name for name, times in seen.items() if times > 1),
            foreign=tuple(foreign),
        )

    def stats(self) -> dict[str, Any]:
        """Where the run stands: counts of groups and samples in memory, and of what was refused since the start."""
        states = Counter(now.state.value for group in self._groups.values() for now in group.samples)
        return {
            "groups_issued": self._next,
            "groups_waiting": len(self._free),
            "states": dict(states),
            "consumed": self.consumed,
            "committed": self.committed,
            "tokens_in_flight": sum(group.tokens for group in self._groups.values()),
            "tokens_kept": {str(owner): tokens for owner, tokens in self._kept.items()},
            "failure_streak": self._streak,
            "exhausted": self.exhausted,
            **{
                name: self._counts[name]
                for name in (
                    "duplicate_appends",
                    "duplicate_finishes",
                    "duplicate_failures",
                    "superseded",
                    "fenced",
                    "failures",
                    "replayed",
                )
            },
        }


def _joined(segments: list[Segment]) -> tuple[Segment, ...]:
    """Neighbours of one version made by one owner become one segment: many small appends are one to the reader."""
    runs: list[list[Segment]] = []
    for segment in segments:
        if runs and (runs[-1][0].version, runs[-1][0].owner) == (segment.version, segment.owner):
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return tuple(
        Segment(
            run[0].start,
            b"".join(one.ids for one in run),
            b"".join(one.logprobs for one in run),
            run[0].version,
            run[0].owner,
        )
        for run in runs
    )


def _same(segments: list[Segment], op: AppendOp, count: int) -> bool:
    """Whether the first `count` tokens of `op` are the saved ones, log-probabilities and version included."""
    low, high = op.start, op.start + count
    for segment in segments:
        first, last = max(low, segment.start), min(high, segment.start + len(segment))
        if first >= last:
            continue
        mine = slice((first - segment.start) * ITEM, (last - segment.start) * ITEM)
        theirs = slice((first - low) * ITEM, (last - low) * ITEM)
        if (segment.ids[mine], segment.logprobs[mine], segment.version) != (
            op.ids[theirs],
            op.logprobs[theirs],
            op.version,
        ):
            return False
    return True
