"""Who works on what: the rollouts' side of the ledger."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from robustrl import events
from robustrl.config import PersistConfig
from robustrl.errors import IllegalMoveError, LedgerError
from robustrl.persist import trajectory as life
from robustrl.persist.board import Board, Group, as_sample
from robustrl.persist.frontier import Frontier
from robustrl.persist.records import (
    END,
    ITEM,
    RESTART,
    AppendOp,
    End,
    FailOp,
    FinishOp,
    LeaseGrant,
    Op,
    Outcome,
    Prompt,
    Segment,
)
from robustrl.persist.trajectory import DONE, State, trajectory_id
from robustrl.roles import Identity, Member


class Leases:
    """Hands groups out, takes tokens and answers, and gives up what cannot be had.

    Args:
        board: the groups.
        frontier: where the optimizer stands, for the staleness of what is handed out.
        groups_per_batch: B.
        total_steps: optimizer steps of the job.
        prompt: the prompt of a number, or None past the last one.
        config: staleness, limits of attempts.
        now: monotonic seconds.
    """

    def __init__(
        self,
        board: Board,
        frontier: Frontier,
        groups_per_batch: int,
        total_steps: int,
        prompt: Callable[[int], Prompt | None],
        config: PersistConfig,
        now: Callable[[], float],
    ) -> None:
        self._board = board
        self._frontier = frontier
        self._b = groups_per_batch
        self._total_steps = total_steps
        self._source_end: int | None = None
        self._prompt = prompt
        self._config = config
        self._now = now
        self._told_end: set[Identity] = set()
        self.kept: dict[Identity, int] = {}
        """Tokens that each owner delivered, ever."""
        self.next = 0
        """The first group that was never handed out."""
        self.streak = 0
        self._first_cause = ""
        self.exhausted: str | None = None
        """The first cause of the streak of failures that is longer than allowed; nothing is handed out after it."""

    def load(self) -> None:
        self.kept = {Identity.parse(name): int(tokens) for name, tokens in self._board.store.rows("owners")}
        self.next = max(self._board.groups, default=self._frontier.low - 1) + 1
        self._source_end = self._board.store.value("source_end", None)

    def end(self) -> int:
        """The first group number that the run does not reach."""
        planned = self._total_steps * self._b + self._frontier.skipped()
        return planned if self._source_end is None else min(planned, self._source_end)

    # -- handing out -------------------------------------------------------------------------------------------------

    def lease(self, owner: Identity, held_steps: Sequence[int], request: str) -> LeaseGrant | End | None:
        """See `Ledger.lease`."""
        if request:
            for group in self._board.groups.values():
                if group.owner == owner and group.request == request and not group.done:
                    return self._grant(group)
        if self.exhausted is not None:
            return None
        index = min(self._board.free, default=self.next)
        if index < self.end():
            if max(held_steps, default=-1) < self._required(index):
                return None
            if index == self.next:
                self._issue()
        if index >= self.end():
            if not all(group.done for group in self._board.groups.values()):
                return None
            if owner not in self._told_end:
                self._told_end.add(owner)
                self._board.say(events.TokensKept(owner=str(owner), tokens=self.kept.get(owner, 0)))
            return END
        group = self._board.groups[index]
        self._board.free.discard(index)
        group.attempt += 1
        group.owner, group.request, group.gained, group.heard = owner, request, False, self._now()
        for sample, now in enumerate(group.samples):
            if now.state not in DONE:
                self._board.move(group, sample, life.Lease(owner, group.attempt))
        self._board.put_group(group)
        self._board.put_attempt(group, owner, "open")
        self._board.say(events.Leased(group=index, owner=str(owner), saved_tokens=group.tokens))
        return self._grant(group)

    def _required(self, index: int) -> int:
        """The oldest weight step that may make tokens of a group."""
        position = index - self._frontier.skipped(index)
        return max(0, position // self._b - self._config.staleness)

    def _issue(self) -> None:
        """Takes the next prompt from the source, or learns that it has ended."""
        prompt = self._prompt(self.next)
        if prompt is None:
            self._source_end = self.next
            self._board.store.put("meta", "source_end", self.next)
            self._board.changed()
            return
        self._board.add(self.next, prompt)
        self.next += 1
        self._board.counts["issued"] += 1

    def _grant(self, group: Group) -> LeaseGrant:
        return LeaseGrant(
            group=group.index,
            attempt=group.attempt,
            prompt=group.prompt,
            samples=tuple(as_sample(group, sample) for sample in range(self._board.samples_per_prompt)),
            required_step=self._required(group.index) if self._config.exact_staleness else None,
        )

    # -- words of owners -----------------------------------------------------------------------------------------------

    def apply(self, owner: Identity, op: Op) -> Outcome:
        """See `Ledger.append`, `Ledger.finish` and `Ledger.fail`."""
        group = self._board.groups.get(op.group)
        if group is None and 0 <= op.group < self._frontier.low:
            # Committed long ago: whatever this is, it is late.
            return self._superseded(owner, op, "its group is committed")
        if group is None:
            raise LedgerError(f"group {op.group} was never handed out", who=owner)
        if op.sample is not None and not 0 <= op.sample < self._board.samples_per_prompt:
            raise LedgerError(
                f"group {op.group} has no sample {op.sample}", who=owner, why=f"it has {self._board.samples_per_prompt}"
            )
        if group.owner != owner or group.attempt != op.attempt:
            holder = f"attempt {group.attempt}, held by {group.owner}" if group.owner else "held by nobody"
            return self._superseded(owner, op, f"it is {holder}")
        match op:
            case AppendOp():
                outcome = self._append(owner, group, op)
            case FinishOp():
                outcome = self._finish(owner, group, op)
            case FailOp():
                return self._fail(owner, group, op)
        group.heard = self._now()
        group.gained |= outcome is Outcome.ACCEPTED
        return outcome

    def _superseded(self, owner: Identity, op: Op, why: str) -> Outcome:
        self._board.counts["superseded"] += 1
        name = str(op.group) if op.sample is None else trajectory_id(op.group, op.sample)
        what = {AppendOp: "tokens", FinishOp: "an answer", FailOp: "a failure"}[type(op)]
        self._board.emit(events.Refused(what=f"{what} of {name}, attempt {op.attempt}", identity=str(owner), why=why))
        return Outcome.SUPERSEDED

    def _append(self, owner: Identity, group: Group, op: AppendOp) -> Outcome:
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
            self._board.counts["duplicate_appends"] += 1
            return Outcome.DUPLICATE
        start = op.start + known
        try:
            self._board.move(group, op.sample, life.Append(owner, op.attempt, start, count - known))
        except IllegalMoveError as error:
            raise LedgerError(error.what, who=owner, why=error.why) from error
        segment = Segment(
            start,
            op.ids[known * ITEM :],
            op.logprobs[known * ITEM :],
            op.version,
            str(owner),
            op.trained,
            op.sampling,
            op.state,
        )
        group.segments[op.sample].append(segment)
        self._board.put_segment(group.index, op.sample, segment)
        self.kept[owner] = self.kept.get(owner, 0) + count - known
        self._board.store.put("owners", str(owner), self.kept[owner])
        return Outcome.ACCEPTED

    def _finish(self, owner: Identity, group: Group, op: FinishOp) -> Outcome:
        now = group.samples[op.sample]
        if not math.isfinite(op.reward):
            raise LedgerError(
                f"the reward of {now.id} is {op.reward}", who=owner, do="Report a failure instead: it is not a reward."
            )
        try:
            finish = life.Finish(owner, op.attempt, op.tokens, float(op.reward), op.reason)
            moved = self._board.move(group, op.sample, finish)
        except IllegalMoveError as error:
            raise LedgerError(error.what, who=owner, why=error.why) from error
        if not moved:
            self._board.counts["duplicate_finishes"] += 1
            return Outcome.DUPLICATE
        self.streak, self._first_cause = 0, ""
        if group.done:
            self._board.put_attempt(group, owner, "finished")
        self._board.changed()
        return Outcome.ACCEPTED

    def _fail(self, owner: Identity, group: Group, op: FailOp) -> Outcome:
        struck = [
            sample
            for sample, now in enumerate(group.samples)
            if now.state is State.LEASED and op.sample in (None, sample)
        ]
        if not struck:
            self._board.counts["duplicate_failures"] += 1
            return Outcome.DUPLICATE
        dropped = 0
        for sample in struck:
            tokens = group.samples[sample].tokens
            self._board.move(group, sample, life.Fail(owner, op.attempt, op.kind, op.kind != RESTART))
            if op.kind == RESTART and tokens:
                dropped += tokens
                self._board.drop_tokens(group, sample)
        if dropped:
            self._board.say(events.TokensDropped(tokens=dropped, why=f"restart: {op.detail}"))
            group.gained = False
        self._end_lease(group, f"failed: {op.kind}", op.detail)
        self._board.counts["failures"] += 1
        self.streak += 1
        if self.streak == 1:
            self._first_cause = f"{op.kind} of group {group.index} at {owner}: {op.detail}"
        if self.streak > self._config.max_failure_streak and self.exhausted is None:
            self.exhausted = self._first_cause
        return Outcome.ACCEPTED

    # -- the end of leases ---------------------------------------------------------------------------------------------

    def fence(self, member: Member, before: int, below: int) -> int:
        """Ends the leases of the incarnations of `member` under `below`; under `before` they had ended already."""
        released = 0
        for group in list(self._board.groups.values()):
            owner = group.owner
            if owner is not None and owner.member == member and owner.incarnation < below and not group.done:
                self._end_lease(group, "released", "its owner is gone")
                released += 1
        for owner, tokens in self.kept.items():
            if owner.member == member and before <= owner.incarnation < below and owner not in self._told_end:
                self._board.say(events.TokensKept(owner=str(owner), tokens=tokens))
        self._board.changed()
        return released

    def expire(self) -> list[int]:
        """Ends leases whose owners were silent for `lease_s`: alive or not, they do not come on. Returns the groups."""
        if self._config.lease_s is None:
            return []
        late = [
            group
            for group in self._board.groups.values()
            if group.owner is not None and not group.done and self._now() - group.heard > self._config.lease_s
        ]
        for group in late:
            waiting = [now.id for now in group.samples if now.state is State.LEASED]
            text = f"nothing came of {', '.join(waiting)} from {group.owner} for {self._config.lease_s:g} s"
            self._board.say(events.Alarm(text=text, member=str(group.owner.member) if group.owner else ""))
            self._board.counts["expired"] += 1
            self._end_lease(group, "expired", text)
        return [group.index for group in late]

    def _end_lease(self, group: Group, outcome: str, detail: str) -> None:
        """Ends a lease before its group was done; gives the group up when attempt after attempt brought nothing."""
        group.barren = 0 if group.gained else group.barren + 1
        if group.barren < self._config.max_barren_attempts:
            self._board.release(group, outcome, detail)
            return
        self._board.release(group, "given up", detail)
        for sample, now in enumerate(group.samples):
            if now.state not in DONE:
                self._board.move(group, sample, life.GiveUp(outcome))
        self._board.free.discard(group.index)
        self._board.counts["given_up"] += 1
        self._board.say(
            events.GroupGivenUp(
                group=group.index,
                finished=len(group.finished),
                samples=self._board.samples_per_prompt,
                rule=self._config.partial_groups,
                why=f"{group.barren} attempts in a row brought nothing; the last one: {outcome}, {detail}",
            )
        )

    def discard(self, why: str) -> int:
        """Forgets all tokens and answers that are not committed. Returns the tokens lost."""
        dropped = 0
        for group in self._board.groups.values():
            dropped += group.tokens
            if group.owner is not None and not group.done:
                self._board.put_attempt(group, group.owner, "discarded", why)
            for sample in range(self._board.samples_per_prompt):
                self._board.drop_tokens(group, sample)
                self._board.move(group, sample, life.Discard())
            group.owner, group.request, group.barren = None, "", 0
            self._board.put_group(group)
            self._board.free.add(group.index)
        self._told_end.clear()
        return dropped


def _same(segments: list[Segment], op: AppendOp, count: int) -> bool:
    """Whether the first `count` tokens of `op` are the saved ones, log-probabilities and version included."""
    low, high = op.start, op.start + count
    for segment in segments:
        first, last = max(low, segment.start), min(high, segment.start + len(segment))
        if first >= last:
            continue
        mine = slice((first - segment.start) * ITEM, (last - segment.start) * ITEM)
        theirs = slice((first - low) * ITEM, (last - low) * ITEM)
        if (segment.ids[mine], segment.logprobs[mine]) != (op.ids[theirs], op.logprobs[theirs]):
            return False
        if (segment.version, segment.trained, segment.sampling) != (op.version, op.trained, op.sampling):
            return False
    return True
