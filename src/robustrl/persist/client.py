"""The ledger as a member sees it: typed calls, and a buffer between the thread that generates and the wire.

The generation loop calls `LeaseWriter.append` for each token; that is a lock and a list. A task of the event loop
sends what has gathered every `flush_s`, and sends it again, in order, when the ledger was away: each word names its
place, so a word that arrives twice changes nothing. Unacknowledged tokens are bounded; at the bound `append` waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Self

import msgspec

from robustrl.errors import (
    DeadlineError,
    FencedError,
    HandshakeRefusedError,
    JobFailedError,
    LedgerError,
    MemberFailedError,
    RobustError,
)
from robustrl.persist.records import (
    END,
    AppendOp,
    Audit,
    Batch,
    End,
    FailOp,
    FinishOp,
    LeaseGrant,
    Op,
    OpResult,
    Outcome,
    Rewound,
    Scored,
    pack_ids,
    pack_logprobs,
)
from robustrl.wire import Call

log = logging.getLogger("robustrl.persist")

MAX_UNACKED_TOKENS: Final = 1 << 18
MESSAGE_TOKENS: Final = 1 << 18
"""Tokens in one message at the most (8 bytes each), far below a frame."""
WORD_TOKENS: Final = 16
"""What a word without tokens counts in a message."""
RETRY_S: Final = 0.1


class _Kind(NamedTuple):
    """What the tokens of a run have in common; see `Segment`."""

    version: str
    trained: bool = True
    sampling: str = ""


class _Run:
    """Tokens of one sample and one kind that have not been sent yet; grows until it is sent, or has a state."""

    __slots__ = ("ids", "kind", "logprobs", "sample", "start", "state")

    def __init__(self, sample: int, start: int, kind: _Kind) -> None:
        self.sample = sample
        self.start = start
        self.kind = kind
        self.ids = array("i")
        self.logprobs = array("f")
        self.state = b""


class _Word:
    """Something to tell the ledger about one lease: a run of tokens, or a finish or fail."""

    __slots__ = ("run", "whole", "writer")

    def __init__(self, writer: LeaseWriter, *, run: _Run | None = None, whole: FinishOp | FailOp | None = None) -> None:
        self.writer = writer
        self.run = run
        self.whole = whole

    def op(self) -> Op:
        if self.run is None:
            assert self.whole is not None
            return self.whole
        return AppendOp(
            group=self.writer.grant.group,
            attempt=self.writer.grant.attempt,
            sample=self.run.sample,
            start=self.run.start,
            ids=pack_ids(self.run.ids),
            logprobs=pack_logprobs(self.run.logprobs),
            version=self.run.kind.version,
            trained=self.run.kind.trained,
            sampling=self.run.kind.sampling,
            state=self.run.state,
        )


class LeaseWriter:
    """What the owner of a lease says about its group. Methods may be called from any thread.

    Each returns whether the lease still holds, as far as is known; after False the group is somebody else's, and
    work on it is to stop. Errors of the wire appear here as well: FencedError and JobFailedError end the member.
    """

    def __init__(self, client: LedgerClient, grant: LeaseGrant) -> None:
        self.grant = grant
        self.lost = False
        """The ledger answered "superseded"."""
        self.error: LedgerError | None = None
        """The ledger refused a word as contradicting what it holds; raised by the next call."""
        self._client = client
        self._tokens = [sample.tokens for sample in grant.samples]
        self._runs: dict[int, _Run] = {}

    def tokens(self, sample: int) -> int:
        """The answer's length so far: tokens that earlier owners saved, and those that were appended here."""
        return self._tokens[sample]

    def append(
        self, sample: int, token: int, logprob: float, version: str, *, sampling: str = "", state: bytes = b""
    ) -> bool:
        """One more token of `sample`. Waits only while too many tokens are unacknowledged.

        Args:
            sample: number of the answer in its group.
            token: its id.
            logprob: of the token, under `version`.
            version: the weights that made it.
            sampling: the parameters that it was drawn with, to be written down beside it.
            state: what an agent needs to go on after this token, if a turn ends here; opaque to the ledger.

        Raises:
            DeadlineError: the ledger took nothing for the whole patience.
            FencedError, JobFailedError: this member is to end.
            LedgerError: an earlier word contradicted what is saved.
        """
        return self._client._append(self, sample, (token,), (logprob,), _Kind(version, True, sampling), state)

    def observe(self, sample: int, tokens: Sequence[int], *, state: bytes = b"") -> bool:
        """Tokens of the answer that no weights made and that are not trained on: what a tool said. See `append`."""
        going = True
        for start in range(0, len(tokens), MESSAGE_TOKENS):
            some = tokens[start : start + MESSAGE_TOKENS]
            last = start + len(some) == len(tokens)
            kind = _Kind("", trained=False)
            going = self._client._append(self, sample, some, [0.0] * len(some), kind, state if last else b"")
        return going

    def finish(self, sample: int, reward: float, reason: str = "") -> bool:
        """The answer of `sample` is whole and scored."""
        op = FinishOp(
            group=self.grant.group,
            attempt=self.grant.attempt,
            sample=sample,
            tokens=self._tokens[sample],
            reward=float(reward),
            reason=reason,
        )
        return self._client._say(self, sample, op)

    def fail(self, kind: str, detail: str = "", sample: int | None = None) -> bool:
        """An infrastructure failure ended the attempt; the group goes to another owner. See `Ledger.fail`."""
        op = FailOp(group=self.grant.group, attempt=self.grant.attempt, sample=sample, kind=kind, detail=detail)
        return self._client._say(self, sample, op)


class LedgerClient:
    """Calls to the ledger, and the buffer of this member's words.

    Use it as an async context manager where leases are written: it runs the task that sends.

    Args:
        call: how calls travel (`RpcClient.call`), retried by itself over reconnects.
        flush_s: the longest that a token stays only in this process while the ledger is there.
        max_unacked_tokens: tokens in the buffer at which `append` waits.
        patience_s: how long `append` and `flush` wait for a ledger that is away.
    """

    def __init__(
        self,
        call: Call,
        *,
        flush_s: float = 0.05,
        max_unacked_tokens: int = MAX_UNACKED_TOKENS,
        patience_s: float = 60.0,
    ) -> None:
        self._call = call
        self._flush_s = flush_s
        self._max_tokens = max_unacked_tokens
        self._patience_s = patience_s
        self._lock = threading.Condition()
        self._words: deque[_Word] = deque()
        self._unacked = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._settled = asyncio.Event()
        self._said = 0
        self._done = 0
        """Words that were said, and that the ledger has answered; both in order."""
        self._hurry_to = 0
        self._task: asyncio.Task[None] | None = None
        self._request = ""
        self._leasing = asyncio.Lock()
        self.fatal: RobustError | None = None
        """Why nothing is sent any more: this member was fenced, the job failed, or there is a bug."""

    # -- calls -----------------------------------------------------------------------------------------------------

    async def lease(self, held_steps: list[int], *, wait_s: float = 10.0) -> LeaseGrant | End | None:
        """A group to work on; None when there was none within `wait_s`; END when the run needs no more.

        It may be cancelled: a grant that was on its way is the answer of the next call. So a rollout that gets newer
        weights while it waits cancels, and asks again with the steps that it holds now.
        """
        async with self._leasing:
            self._request = self._request or uuid.uuid4().hex
            answer = await self._call(
                "ledger.lease",
                timeout=wait_s + self._patience_s,
                held_steps=list(held_steps),
                request=self._request,
                wait_s=wait_s,
            )
            if not answer["end"] and answer["grant"] is None:
                return None  # the request stands: what an earlier call of it may yet have got is the next one's
            self._request = ""
        return END if answer["end"] else msgspec.convert(answer["grant"], LeaseGrant)

    def writer(self, grant: LeaseGrant) -> LeaseWriter:
        return LeaseWriter(self, grant)

    async def next_batch(self, step: int, *, wait_s: float = 10.0) -> Batch | End | None:
        """The batch of optimizer step `step` (from 1); None when it is not complete within `wait_s`; END after the
        last. See `Ledger.next_batch`.

        Raises:
            JobFailedError: attempts fail again and again; carries the first cause.
        """
        answer = await self._call("ledger.next_batch", timeout=wait_s + self._patience_s, step=step, wait_s=wait_s)
        if answer["end"]:
            return END
        if answer["batch"] is None:
            return None
        batch = msgspec.convert(answer["batch"], Batch)
        trajectories = list(batch.trajectories)
        while len(trajectories) < answer["total"]:
            page = await self._call("ledger.page", step=step, offset=len(trajectories))
            if not page:
                raise LedgerError(f"the batch of step {step} came short", why=f"{len(trajectories)} trajectories")
            trajectories += msgspec.convert(page, list[Scored])
        return msgspec.structs.replace(batch, trajectories=tuple(trajectories))

    async def commit(self, step: int) -> None:
        """The durable point of `step` exists. See `Ledger.commit`."""
        await self._call("ledger.commit", step=step)

    async def rewind(self, step: int) -> Rewound:
        """This trainer came back at the durable point of `step`. See `Ledger.rewind`."""
        return msgspec.convert(await self._call("ledger.rewind", step=step), Rewound)

    async def fence(self, member: str, below_incarnation: int) -> int:
        """For the supervisor: see `Ledger.release_owner`."""
        return int(await self._call("ledger.fence", member=member, below_incarnation=below_incarnation))

    async def discard_uncommitted(self, why: str = "whole-job restart") -> int:
        """For the supervisor: see `Ledger.discard_uncommitted`."""
        return int(await self._call("ledger.discard", why=why))

    async def audit(self, total_steps: int) -> Audit:
        return msgspec.convert(await self._call("ledger.audit", total_steps=total_steps), Audit)

    async def stats(self) -> dict[str, Any]:
        return dict(await self._call("ledger.stats"))

    # -- the buffer ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begins to send. Needed before the first word of a writer."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._task = asyncio.create_task(self._send_forever())

    async def close(self, flush_timeout: float = 5.0) -> None:
        """Sends what is left, within the limit, and stops. What could not be sent is said in the log."""
        if self._task is None:
            return
        if self.fatal is None and not self._task.done():
            try:
                await self.flush(flush_timeout)
            except RobustError as error:
                log.warning("the ledger client closes with %d unsent tokens: %s", self._unacked, error)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        with self._lock:
            self._lock.notify_all()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def unacked_tokens(self) -> int:
        return self._unacked

    async def flush(self, timeout: float | None = None) -> None:
        """Returns when the ledger has everything that was said before.

        Raises:
            DeadlineError: it did not within `timeout` (default: the patience); nothing is lost, it is still being sent.
            FencedError, JobFailedError: it never will.
        """
        limit = self._patience_s if timeout is None else timeout
        with self._lock:
            target = self._hurry_to = self._said
        self._hurry.set()
        try:
            async with asyncio.timeout(limit):
                while self._done < target:
                    self._check()
                    if self._task is None or self._task.done():
                        raise LedgerError("the ledger client does not run", why=f"{self._unacked} tokens are unsent")
                    await self._settled.wait()
        except TimeoutError as error:
            raise DeadlineError(
                f"the ledger did not take {self._unacked} tokens within {limit:g} s",
                do="They stay in the buffer and are sent when it is back.",
            ) from error
        self._check()

    def _check(self) -> None:
        if self.fatal is not None:
            raise self.fatal

    def _append(
        self,
        writer: LeaseWriter,
        sample: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        kind: _Kind,
        state: bytes,
    ) -> bool:
        with self._lock:
            if self._unacked >= self._max_tokens:
                self._wait_for_room()
            if not self._may_speak(writer):
                return False
            run = writer._runs.get(sample)
            fits = run is not None and run.kind == kind and len(run.ids) + len(tokens) <= MESSAGE_TOKENS
            if run is None or not fits or run.state:
                run = writer._runs[sample] = _Run(sample, writer._tokens[sample], kind)
                self._queue(_Word(writer, run=run))
            run.ids.extend(tokens)
            run.logprobs.extend(logprobs)
            run.state = state
            writer._tokens[sample] += len(tokens)
            self._unacked += len(tokens)
            return True

    def _say(self, writer: LeaseWriter, sample: int | None, op: FinishOp | FailOp) -> bool:
        with self._lock:
            if not self._may_speak(writer):
                return False
            if sample is None:
                writer._runs.clear()
            else:
                writer._runs.pop(sample, None)
            self._queue(_Word(writer, whole=op))
            return True

    def _may_speak(self, writer: LeaseWriter) -> bool:
        self._check()
        if writer.error is not None:
            raise writer.error
        if self._loop is None:
            raise LedgerError("the ledger client was not started", do="Use it as an async context manager.")
        return not writer.lost

    def _queue(self, word: _Word) -> None:
        self._words.append(word)
        self._said += 1
        if len(self._words) == 1 and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop ended: whoever waits for an answer learns it there
                self._loop.call_soon_threadsafe(self._wake.set)

    def _wait_for_room(self) -> None:
        if threading.get_ident() == self._loop_thread:
            raise LedgerError(
                f"{self._unacked} tokens are unacknowledged",
                why="append was called in the event loop's own thread, which has to send them",
                do="Append from another thread, or await flush() between.",
            )
        deadline = time.monotonic() + self._patience_s
        while self._unacked >= self._max_tokens and self.fatal is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"the ledger took no token for {self._patience_s:g} s", why=f"{self._unacked} are unacknowledged"
                )
            self._lock.wait(left)

    async def _send_forever(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._flush_s):
                        await self._hurry.wait()
                full = True
                while full or self._done < self._hurry_to:
                    full = await self._send_some()
                self._hurry.clear()
                if self._words:
                    self._wake.set()
        except RobustError as error:
            self.fatal = error
        except Exception as error:
            log.exception("sending to the ledger ended")
            self.fatal = MemberFailedError("sending to the ledger ended", why=f"{type(error).__name__}: {error}")
        finally:
            self._tell_settled()
            with self._lock:
                self._lock.notify_all()

    def _tell_settled(self) -> None:
        self._settled.set()
        self._settled = asyncio.Event()

    def _take(self) -> tuple[list[_Word], bool]:
        """Takes the oldest words from the buffer, as many as fit one message, and says whether it is full."""
        size = 0
        words: list[_Word] = []
        with self._lock:
            while self._words:
                size += WORD_TOKENS if self._words[0].run is None else WORD_TOKENS + len(self._words[0].run.ids)
                if words and size > MESSAGE_TOKENS:
                    return words, True
                word = self._words.popleft()
                words.append(word)
                if word.run is not None and word.writer._runs.get(word.run.sample) is word.run:
                    del word.writer._runs[word.run.sample]  # from now on it does not grow
        return words, False

    async def _send_some(self) -> bool:
        """Sends one message, again until the ledger took it. Returns whether it was full: more is waiting."""
        words, full = self._take()
        ops = [word.op() for word in words]
        while ops:
            try:
                results = msgspec.convert(await self._call("ledger.write", ops=ops), list[OpResult])
                self._settle(words, results)
                break
            except (FencedError, JobFailedError, HandshakeRefusedError):
                raise
            except (RobustError, msgspec.ValidationError) as error:
                log.warning("the ledger did not take %d tokens yet: %s", self._unacked, error)
            await asyncio.sleep(RETRY_S)
        return full

    def _settle(self, words: list[_Word], results: list[OpResult]) -> None:
        with self._lock:
            for word, result in zip(words, results, strict=True):
                if word.run is not None:
                    self._unacked -= len(word.run.ids)
                if result.outcome is Outcome.SUPERSEDED:
                    word.writer.lost = True
                elif result.outcome is None and word.writer.error is None:
                    word.writer.error = LedgerError(
                        f"the ledger refused a word about group {word.writer.grant.group}", why=result.why
                    )
            self._done += len(words)
            self._lock.notify_all()
        self._tell_settled()
