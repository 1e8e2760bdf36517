"""The ledger for members in other processes: an RPC handler that answers after the store has the words.

Words that arrive within `commit_delay_s` of each other share one transaction. Waiting calls (`lease`, `next_batch`
with `wait_s`) sleep until something changed; they do not poll. Each method may be called twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec

from robustrl import events
from robustrl.errors import JobFailedError, LedgerError, RobustError, RoleDownError, StorageError, WriterFencedError
from robustrl.persist.ledger import Ledger
from robustrl.persist.records import (
    AppendOp,
    Batch,
    End,
    FailOp,
    FinishOp,
    LeaseGrant,
    Op,
    OpResult,
    Outcome,
    Scored,
)
from robustrl.roles import MANAGER, SUPERVISOR, TRAINER, Identity, Member

COMMIT_DELAY_S: Final = 0.002
PAGE_BYTES: Final = 8 << 20
"""Bytes of tokens in one answer about a batch, well below a frame."""
LONGEST_WAIT_S: Final = 30.0
"""A waiting call is answered after this at the latest; its client asks again."""

T = TypeVar("T")


class _Lease(msgspec.Struct, forbid_unknown_fields=True):
    held_steps: list[int]
    request: str = ""
    wait_s: float = 0.0


class _Write(msgspec.Struct, forbid_unknown_fields=True):
    ops: list[Op]


class _NextBatch(msgspec.Struct, forbid_unknown_fields=True):
    step: int
    wait_s: float = 0.0


class _Page(msgspec.Struct, forbid_unknown_fields=True):
    step: int
    offset: int


class _Step(msgspec.Struct, forbid_unknown_fields=True):
    step: int


class _Fence(msgspec.Struct, forbid_unknown_fields=True):
    member: str
    below_incarnation: int


class _Discard(msgspec.Struct, forbid_unknown_fields=True):
    why: str


class _Audit(msgspec.Struct, forbid_unknown_fields=True):
    total_steps: int


class _Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Outdated:
    """The answer of a call that its caller has replaced by another one."""


class LedgerService:
    """Answers calls for a ledger; its `handle` is a `wire.Handler`.

    Args:
        ledger: the core; only this service calls it from now on.
        emit: takes alarms about the store.
        commit_delay_s: the longest that a word waits for company before it is made durable.
    """

    def __init__(
        self, ledger: Ledger, *, emit: events.Emit = events.ignore, commit_delay_s: float = COMMIT_DELAY_S
    ) -> None:
        self.ledger = ledger
        self._emit = emit
        self._delay = commit_delay_s
        self._commit: asyncio.Future[None] | None = None
        self._change = asyncio.Event()
        self._seen = ledger.revision
        self._asking: dict[Identity, int] = {}
        """By member, the number of its newest call for a lease."""
        self._storing = True
        self.superseded = asyncio.Event()
        """Set when another process took over the store: this one must end, its clients find the other."""
        self._methods: dict[str, tuple[type[Any], Callable[[Identity, Any], Awaitable[Any]]]] = {
            "ledger.lease": (_Lease, self._lease),
            "ledger.write": (_Write, self._write),
            "ledger.append": (AppendOp, self._word),
            "ledger.finish": (FinishOp, self._word),
            "ledger.fail": (FailOp, self._word),
            "ledger.next_batch": (_NextBatch, self._next_batch),
            "ledger.page": (_Page, self._page),
            "ledger.commit": (_Step, self._commit_step),
            "ledger.rewind": (_Step, self._rewind),
            "ledger.fence": (_Fence, self._fence),
            "ledger.discard": (_Discard, self._discard),
            "ledger.audit": (_Audit, self._audit),
            "ledger.stats": (_Nothing, self._stats),
        }

    async def handle(self, caller: Identity, method: str, params: dict[str, Any]) -> Any:
        """Answers one call with a value of msgpack's types. Raises LedgerError for an unknown or malformed one."""
        if self.superseded.is_set():
            raise RoleDownError("this ledger server was replaced", who=caller)
        if method not in self._methods:
            raise LedgerError(f"the ledger has no method {method!r}", who=caller)
        kind, answer = self._methods[method]
        try:
            asked = msgspec.convert(params, kind)
        except msgspec.ValidationError as error:
            raise LedgerError(f"{method} was called wrongly", who=caller, why=str(error)) from error
        return msgspec.to_builtins(await answer(caller, asked), builtin_types=(bytes,))

    # -- durability and waiting --------------------------------------------------------------------------------------

    async def _durable(self, delay: float | None = None) -> None:
        """Returns when all that was done until now is on the store."""
        if self._commit is None:
            loop = asyncio.get_running_loop()
            self._commit = loop.create_future()
            self._commit.add_done_callback(lambda done: done.exception())  # a caller may have gone meanwhile
            loop.call_later(self._delay if delay is None else delay, self._flush, self._commit)
        await asyncio.shield(self._commit)

    def _flush(self, commit: asyncio.Future[None]) -> None:
        self._commit = None
        try:
            self._guarded(self.ledger.flush)
        except RobustError as error:
            commit.set_exception(error)
        else:
            commit.set_result(None)

    def _guarded(self, work: Callable[[], T]) -> T:
        """Runs what writes to the store; says it once when the store stops taking words, and wakes who waits."""
        try:
            value = work()
            self._storing = True
            return value
        except StorageError as error:
            if self._storing:
                self._storing = False
                self._emit(events.Alarm(text=f"the ledger cannot store: {error}"))
            raise
        except WriterFencedError as error:
            self.superseded.set()
            raise RoleDownError("this ledger server was replaced", why=str(error)) from error
        finally:
            if self.ledger.revision != self._seen or self.superseded.is_set():
                self._seen = self.ledger.revision
                self._change.set()
                self._change = asyncio.Event()

    async def _until(self, ask: Callable[[], T | None], wait_s: float) -> T | None:
        """The first answer of `ask` that is not None, asked again at each change; None after `wait_s` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(wait_s, LONGEST_WAIT_S)
        while True:
            change = self._change
            with self.ledger.deferred():
                answer = ask()
            await self._durable(0.0)
            if answer is not None or loop.time() >= deadline:
                return answer
            try:
                async with asyncio.timeout_at(deadline):
                    await change.wait()
            except TimeoutError:
                return None
            if self.superseded.is_set():
                raise RoleDownError("this ledger server was replaced")

    async def expire_leases(self) -> None:
        """Ends leases of silent owners for as long as it runs; its host runs it beside the server. Returns at once
        where `persist.lease_s` is None."""
        limit = self.ledger.config.lease_s
        while limit is not None and not self.superseded.is_set():
            await asyncio.sleep(min(limit / 4, 1.0))
            with contextlib.suppress(StorageError), self.ledger.deferred():
                if self.ledger.expire():
                    await self._durable(0.0)

    # -- methods -------------------------------------------------------------------------------------------------------

    async def _lease(self, caller: Identity, asked: _Lease) -> Any:
        # A member asks one thing at a time. A call of which it was not told the end (it gave up waiting, or its
        # connection broke) must not take a group later on: nobody would work on it.
        mine = self._asking[caller] = self._asking.get(caller, 0) + 1

        def ask() -> LeaseGrant | End | _Outdated | None:
            if self._asking[caller] != mine:
                return _Outdated()
            return self.ledger.lease(caller, asked.held_steps, asked.request)

        grant = await self._until(ask, asked.wait_s)
        return {"end": isinstance(grant, End), "grant": grant if isinstance(grant, LeaseGrant) else None}

    async def _write(self, caller: Identity, asked: _Write) -> list[OpResult]:
        results = []
        with self.ledger.deferred():
            for op in asked.ops:
                try:
                    results.append(OpResult(self.ledger.apply(caller, op)))
                except StorageError:
                    raise
                except LedgerError as error:
                    results.append(OpResult(None, str(error)))
        await self._durable()
        return results

    async def _word(self, caller: Identity, op: Op) -> Outcome:
        with self.ledger.deferred():
            outcome = self.ledger.apply(caller, op)
        await self._durable()
        return outcome

    async def _next_batch(self, caller: Identity, asked: _NextBatch) -> Any:
        batch = await self._until(lambda: self._ask_batch(caller, asked.step), asked.wait_s)
        if not isinstance(batch, Batch):
            return {"end": isinstance(batch, End), "batch": None, "total": 0}
        page = msgspec.structs.replace(batch, trajectories=_page_of(batch.trajectories, 0))
        return {"end": False, "batch": page, "total": len(batch.trajectories)}

    def _ask_batch(self, caller: Identity, step: int) -> Batch | End | None:
        if self.ledger.exhausted is not None:
            raise JobFailedError(
                f"more than {self.ledger.config.max_failure_streak} attempts failed in a row",
                why=self.ledger.exhausted,
                do="The first cause is the one to look at.",
            )
        return self.ledger.next_batch(caller, step)

    async def _page(self, _caller: Identity, asked: _Page) -> Any:
        return _page_of(self.ledger.batch(asked.step), asked.offset)

    async def _commit_step(self, caller: Identity, asked: _Step) -> None:
        self._guarded(lambda: self.ledger.commit(caller, asked.step))

    async def _rewind(self, caller: Identity, asked: _Step) -> Any:
        return self._guarded(lambda: self.ledger.rewind(caller, asked.step))

    async def _fence(self, caller: Identity, asked: _Fence) -> int:
        self._only_management(caller, "fence members")
        member = Member.parse(asked.member)
        with self.ledger.deferred():
            released = self.ledger.release_owner(member, asked.below_incarnation)
        await self._durable(0.0)
        return released

    async def _discard(self, caller: Identity, asked: _Discard) -> int:
        if caller.member.role != TRAINER:  # it alone knows which durable point the job goes on from
            self._only_management(caller, "discard trajectories")
        with self.ledger.deferred():
            dropped = self.ledger.discard_uncommitted(asked.why, by=caller)
        await self._durable(0.0)
        return dropped

    async def _audit(self, _caller: Identity, asked: _Audit) -> Any:
        return self._guarded(lambda: self.ledger.audit(asked.total_steps))

    async def _stats(self, _caller: Identity, _asked: _Nothing) -> Any:
        return self.ledger.stats()

    def _only_management(self, caller: Identity, what: str) -> None:
        if caller.member.role not in (SUPERVISOR, MANAGER):
            raise LedgerError(f"a {caller.member.role} may not {what}", who=caller)


def _page_of(trajectories: tuple[Scored, ...], offset: int) -> tuple[Scored, ...]:
    """As many trajectories from `offset` on as fit one answer; one at least while there are any."""
    size = 0
    for number, one in enumerate(trajectories[offset:], start=offset):
        size += one.tokens * 8 + 8 * len(one.prompt) + 256
        if size > PAGE_BYTES and number > offset:
            return trajectories[offset:number]
    return trajectories[offset:]
