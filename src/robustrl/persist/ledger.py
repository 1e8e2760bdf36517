"""The trajectory ledger: which answer is whose, what of it is saved, and which optimizer step trained on it.

A synchronous core: one thread calls it, nothing in it waits. Memory holds all that is not committed and decides;
the store is written behind it in one transaction a call, or a group of calls inside `deferred`. What a caller was
told is on the store; events are emitted after that.

Steps count from 1, as in `StepDone`: the batch of step t is made of the prompts (t-1)B .. tB-1 of the source (and of
later ones, where groups that were given up are refilled). Weight steps count from 0 (the initial weights), so step t
trains the weights of step t-1, and its tokens may come from weights of step t-1-s at the oldest.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from robustrl import events
from robustrl.config import PersistConfig
from robustrl.errors import ConfigError, FencedError, LedgerError, StorageError, WriterFencedError
from robustrl.persist import trajectory as life
from robustrl.persist.board import Board
from robustrl.persist.frontier import Frontier
from robustrl.persist.leases import Leases
from robustrl.persist.records import (
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
    Scored,
    pack_ids,
    pack_logprobs,
)
from robustrl.persist.store import Store
from robustrl.persist.trajectory import State, trajectory_id
from robustrl.roles import Identity, Member

Prompts = Callable[[int], "Prompt | None"] | Sequence[Prompt]
"""The prompt source: prompt number -> prompt, None after the last. The same number always gives the same prompt."""


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
        now: monotonic seconds, for leases that expire.
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
        now: Callable[[], float] = time.monotonic,
        emit: events.Emit = events.ignore,
    ) -> None:
        if groups_per_batch < 1 or samples_per_prompt < 1 or total_steps < 1:
            raise ConfigError(
                "a ledger needs at least one prompt a batch, one sample a prompt and one step",
                why=f"{groups_per_batch} prompts, {samples_per_prompt} samples, {total_steps} steps",
            )
        self.groups_per_batch = groups_per_batch
        self.samples_per_prompt = samples_per_prompt
        self.total_steps = total_steps
        self.config = config or PersistConfig()
        self._store = store
        self._prompts = prompts
        self._emit = emit
        self._now = now
        self._board = Board(store, samples_per_prompt, clock, emit)
        self._frontier = Frontier(self._board, groups_per_batch, self.config)
        self._leases = Leases(
            self._board, self._frontier, groups_per_batch, total_steps, self._prompt, self.config, now
        )
        self._fences: dict[Member, int] = {}
        self._deferred = 0
        self._stale = False
        if store.cut:
            text = f"the newest words to the ledger {store.path} were cut off ({store.cut} bytes) and are left out"
            emit(events.Alarm(text=text))
        self._load()

    @property
    def committed(self) -> int:
        """Newest step with a durable point; 0 before the first."""
        return self._frontier.committed

    @property
    def consumed(self) -> int:
        """Newest step whose batch was handed to the optimizer."""
        return self._frontier.consumed

    @property
    def exhausted(self) -> str | None:
        """The first cause of a streak of failures that is longer than allowed; nothing is handed out after it."""
        return self._leases.exhausted

    @property
    def revision(self) -> int:
        """Grows with each change that somebody may wait for."""
        return self._board.revision

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
        self._fences = {Member.parse(name): int(number) for name, number in self._store.rows("fences")}
        self._frontier.load(int(meta.get("committed", 0)))
        self._board.load(self._frontier.low, self._now())
        self._leases.load()
        self._stale = False
        self._store.flush()

    def flush(self) -> None:
        """Makes everything durable that was done since the last flush, then emits its events."""
        self._flush()

    def _flush(self, *, sync: bool = False) -> None:
        try:
            self._store.flush(sync=sync)
        except (StorageError, WriterFencedError):
            self._board.unsaid.clear()
            self._store.forget_pending()
            self._stale = True  # memory must not know more than the store: nobody was told of the difference
            with contextlib.suppress(LedgerError, WriterFencedError):
                self._load()
            self._board.changed()
            raise
        ready, self._board.unsaid = self._board.unsaid, []
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

    def _done(self, *, sync: bool = False) -> None:
        if not self._deferred:
            self._flush(sync=sync)

    # -- who speaks ------------------------------------------------------------------------------------------------

    def _hear(self, speaker: Identity) -> None:
        """Refuses an older incarnation; a newer one fences its predecessors by speaking."""
        if self._stale:
            self._load()
        fence = self._fences.get(speaker.member, 0)
        if speaker.incarnation < fence:
            self._board.counts["fenced"] += 1
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
        return self._leases.fence(member, before, below)

    # -- rollouts --------------------------------------------------------------------------------------------------

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
        grant = self._leases.lease(owner, held_steps, request)
        self._done()
        return grant

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
        outcome = self._leases.apply(owner, op)
        self._done()
        return outcome

    def expire(self) -> list[int]:
        """Ends leases whose owners were not heard of for `persist.lease_s`. Returns the groups; to be called now and
        then."""
        groups = self._leases.expire()
        self._done()
        return groups

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
        batch = self._frontier.next_batch(trainer, step, self._leases.end())
        self._done()
        return batch

    def batch(self, step: int) -> tuple[Scored, ...]:
        """The trajectories that `step` consumed, in the order in which they were handed out."""
        return self._frontier.batch(step)

    def commit(self, trainer: Identity, step: int) -> None:
        """The durable point of `step` exists: the batches up to it are done with. Lower steps again change nothing.

        Raises:
            FencedError: the trainer's incarnation was replaced.
            LedgerError: `step` has not consumed its batch.
        """
        self._hear(trainer)
        self._frontier.commit(trainer, step)
        self._done(sync=True)

    def compact(self, step: int) -> int:
        """Removes the tokens of committed steps up to `step`: no durable point from before it is gone back to any more.
        Who was trained on when stays known. Returns how many steps were compacted."""
        steps = self._frontier.compact(step)
        self._done()
        return steps

    def rewind(self, trainer: Identity, step: int) -> Rewound:
        """The trainer came back at the durable point of `step` (0: from the start); it asks for step + 1 next.

        That the point exists commits the steps up to it. A point older than the newest committed one (which turned
        out unreadable) opens the steps after it again.

        Raises:
            FencedError: the trainer's incarnation was replaced.
            LedgerError: `step` has not consumed its batch.
        """
        self._hear(trainer)
        self._frontier.rewind(trainer, step)
        self._done(sync=True)
        return Rewound(committed=self.committed, consumed=self.consumed)

    def discard_uncommitted(self, why: str = "whole-job restart", *, by: Identity | None = None) -> int:
        """Forgets everything beyond the committed frontier, as a job without a ledger does. Returns the tokens lost.

        Leases end; the groups are handed out again from their first token. `by` is who asks, where it can be fenced.
        """
        if by is not None:
            self._hear(by)
        dropped = self._leases.discard(why)
        self._frontier.discard()
        self._board.say(events.TokensDropped(tokens=dropped, why=why))
        self._board.changed()
        self._done()
        return dropped

    # -- looking back ----------------------------------------------------------------------------------------------

    def audit(self, total_steps: int) -> Audit:
        """Counts the run from the store: each trajectory of steps 1 .. total_steps must be in one committed step."""
        self._flush()
        end = min(total_steps * self.groups_per_batch + self._frontier.skipped(), self._leases.end())
        n = self.samples_per_prompt
        expected = [trajectory_id(index, sample) for index in range(end) for sample in range(n)]
        states = {
            trajectory_id(index, sample): State(state)
            for index, sample, state, *_ in self._store.rows("samples", "grp < ?", end)
        }
        seen: Counter[str] = Counter()
        foreign: list[str] = []
        omitted: set[str] = set()
        spans = {step: span for step, span in sorted(self._frontier.spans.items()) if step <= self.committed}
        for step, span in spans.items():
            seen.update(span.ids)
            groups = range(self._frontier.after(step - 1), span.next)
            foreign += [name for name in span.ids if life.parse_id(name)[0] not in groups]
            for index in groups:
                names = [trajectory_id(index, sample) for sample in range(n)]
                if any(states.get(name) is State.QUARANTINED for name in names):
                    omitted.update(names)
        whole = {name for name, state in states.items() if state is State.COMMITTED}
        gone = omitted - seen.keys()
        return Audit(
            committed=seen.total(),
            steps=len(spans),
            lost=tuple(name for name in expected if name not in gone and (name not in seen or name not in whole)),
            duplicated=tuple(name for name, times in seen.items() if times > 1),
            foreign=tuple(foreign),
            omitted=tuple(name for name in expected if name in gone),
        )

    def stats(self) -> dict[str, Any]:
        """Where the run stands: counts of groups and samples in memory, and of what was refused since the start."""
        states = Counter(now.state.value for group in self._board.groups.values() for now in group.samples)
        return {
            "groups_issued": self._leases.next,
            "groups_waiting": len(self._board.free),
            "states": dict(states),
            "consumed": self.consumed,
            "committed": self.committed,
            "tokens_in_flight": sum(group.tokens for group in self._board.groups.values()),
            "tokens_kept": {str(owner): tokens for owner, tokens in self._leases.kept.items()},
            "failure_streak": self._leases.streak,
            "exhausted": self.exhausted,
            **{
                name: self._board.counts[name]
                for name in (
                    "duplicate_appends",
                    "duplicate_finishes",
                    "duplicate_failures",
                    "superseded",
                    "fenced",
                    "failures",
                    "expired",
                    "given_up",
                    "replayed",
                )
            },
        }
