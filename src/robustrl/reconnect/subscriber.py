"""The receiver's side: pull a version whole or not at all, load it, and serve it on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from robustrl import events
from robustrl.config import ReconnectConfig
from robustrl.errors import (
    CorruptChunkError,
    DeadlineError,
    FencedError,
    PeerGoneError,
    RobustError,
    TransportError,
    WeightMismatchError,
    WireError,
)
from robustrl.events import Emit
from robustrl.reconnect.arrival import ContentGoneError
from robustrl.reconnect.content import Content, load, verify
from robustrl.reconnect.directory import Assignment, Offer
from robustrl.reconnect.holder import Holder
from robustrl.reconnect.manifest import Piece, Range, plan_ranges
from robustrl.reconnect.memory import Mapped, MemoryReport, StagingError
from robustrl.reconnect.partial import Partial, all_sources, all_transports
from robustrl.reconnect.service import DirectoryClient
from robustrl.reconnect.sharding import Layout, layout_key
from robustrl.reconnect.transports import choose
from robustrl.reconnect.transports.base import Session
from robustrl.roles import Identity, Member, Version
from robustrl.wire import Secret
from robustrl.wire.address import LOOPBACK

if TYPE_CHECKING:
    import torch

    from robustrl.reconnect.memory import Memory

log = logging.getLogger("robustrl.reconnect")

RANGE_BYTES: Final = 8 << 20
"""Bytes asked for at once, where chunks are smaller."""
RANGES_AT_LEAST: Final = 32
"""Ranges that a version is pulled in at the least, if it has as many chunks: a relay gives a range on as soon as it
has it, so a range's time is what each member of a chain adds."""
RENEW_S: Final = 0.5
"""How often a puller says that it is still at it."""
PLACE_WAIT_S: Final = 2.0
"""How long to wait for a free source before looking whether the version is still the one to have."""


class HeldVersion(NamedTuple):
    """A version that this member holds, verified. It stays usable for as long as someone refers to it."""

    version: Version
    digest: str
    bytes: int
    contents: tuple[Content, ...]
    """One for each part that was published; most versions have one."""


class _Place:
    """Our place at a source."""

    lost = False
    """The source must not be read any more."""


class WeightSubscriber:
    """Pulls weight versions and serves them on. All calls but `apply` on one event loop, which goes on between them.

    Args:
        identity: the member's.
        directory: says who holds what.
        config: transport, versions kept, deadline of a range.
        secret: the job's secret.
        emit: takes `events.VersionCommitted` and `events.TransportChosen`.
        host: the address to serve on.
        layout: which slice of a tensor this member needs; it needs those whole that are not named.
        on_apply: called with each version that was loaded, before `applied` says so: the place to drop what was
            computed with other weights (KV and prefix caches). When it raises, the member holds no usable weights.
    """

    def __init__(
        self,
        identity: Identity,
        directory: DirectoryClient,
        config: ReconnectConfig,
        secret: Secret,
        emit: Emit,
        *,
        host: str = LOOPBACK,
        layout: Layout | None = None,
        on_apply: Callable[[HeldVersion], None] | None = None,
    ) -> None:
        self.identity = identity
        self._on_apply = on_apply
        self._applied: HeldVersion | None = None
        self._applying = threading.Lock()
        self._layout = layout
        self._key = layout_key(layout)
        self._holder = Holder(identity, directory, config, secret, emit, host=host, origin=False, layout=self._key)
        self._directory = directory
        self._config = config
        self._emit = emit
        self._pulling = asyncio.Lock()
        self._pulls: set[asyncio.Task[HeldVersion | None]] = set()
        self._closed = False
        self._partials: dict[str, Partial] = {}
        """What is on its way, by digest; kept when a pull ends before it is whole."""
        self._floors: dict[Member, int] = {}
        self._told: set[tuple[Identity, str]] = set()
        self.corrupt_chunks = 0
        """Chunks that did not have their digest and were pulled again elsewhere."""
        self.pulled_bytes = 0
        """Bytes of verified chunks that came from others."""
        self.refused_sources = 0
        """How often the directory named a source that is known to have been replaced."""

    def memory_report(self) -> MemoryReport:
        """What the versions held, and the one under way, occupy."""
        return self._holder.memory_report()

    @property
    def served_bytes(self) -> int:
        """Bytes of weights that other pullers were given."""
        return self._holder.served_bytes

    async def start(self) -> None:
        """Begins to serve. Raises MissingDependencyError or ConfigError when the transport cannot be had."""
        await self._holder.start()

    def held(self) -> list[Version]:
        """The versions held, oldest first."""
        return self._holder.held()

    async def pull(
        self, newer_than: Version | None = None, step: int | None = None, timeout: float = 30.0
    ) -> HeldVersion | None:
        """The newest version above `newer_than` (of `step`, where given), pulled, verified and announced.

        A source that dies, freezes or sends corrupt bytes is left for another, and only missing chunks are pulled
        again. Without a source the call waits for one; the versions held before stay untouched. What a call that ran
        into its timeout has already pulled is kept for the next one.

        Returns:
            None when there is nothing new, or no whole version, after `timeout` seconds, or when `close` was called.

        Raises:
            FencedError: a newer incarnation of this member has taken over.
            StagingError: the version does not fit `reconnect.staging_bytes` or this machine's memory.
            WeightError: `layout` does not fit what was published.
        """
        task = asyncio.create_task(self._pull(newer_than, step, timeout))
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed:
                return None
            raise

    async def _pull(self, newer_than: Version | None, step: int | None, timeout: float) -> HeldVersion | None:
        try:
            async with asyncio.timeout(timeout):
                while True:
                    # Outside the lock: who waits for something newer must not keep out who wants what there is.
                    offer = await self._directory.newest(newer_than, step, wait_s=timeout, layout=self._key)
                    async with self._pulling:
                        self._forget_all_but(() if offer is None else offer.shares or (offer.digest,))
                        if offer is not None and (held := await self._take(offer)) is not None:
                            return held
        except (TimeoutError, DeadlineError):
            return None

    @property
    def applied(self) -> HeldVersion | None:
        """What the live tensors hold. Its digest is the key under which results of these weights may be kept.

        None before the first version, while one is loaded, and after a load or `on_apply` failed half-way: such a
        member must not serve until an `apply` has ended well.
        """
        return self._applied

    def apply(self, held: HeldVersion, target: Mapping[str, torch.Tensor]) -> str:
        """Copies a version into live tensors; from any thread, one at a time. Returns the digest of what was loaded.

        Raises:
            WeightMismatchError: a name, shape or dtype differs; no tensor was touched, `applied` stays.
            Exception: what `on_apply` raised; `applied` is None.
        """
        with self._applying:
            before, self._applied = self._applied, None
            try:
                digest = load(held.contents, target, self._layout)
            except WeightMismatchError:
                self._applied = before
                raise
            if self._on_apply is not None:
                self._on_apply(held)
            self._applied = held
        return digest

    async def adopt(self, held: HeldVersion) -> None:
        """Takes over a version that this process held as another member, and serves it."""
        await self._holder.add(held.version, dict(enumerate(held.contents)), len(held.contents))

    async def reannounce(self) -> None:
        """Tells the directory again what is held; to be called after each reconnect to its host."""
        await self._holder.announce()

    async def close(self) -> None:
        """Ends pulls that are under way, says goodbye and serves no more."""
        self._closed = True
        for task in self._pulls:
            task.cancel()
        await asyncio.gather(*self._pulls, return_exceptions=True)
        self._forget_all_but(())
        await self._holder.close()

    # -----------------------------------------------------------------------------------------------------------

    def _forget_all_but(self, digests: Sequence[str]) -> None:
        """Drops halves of versions that nobody has any more, or that are outdated."""
        for digest in [digest for digest in self._partials if digest not in digests]:
            self._holder.arriving.pop(digest, None)
            self._partials.pop(digest).drop()

    async def _take(self, offer: Offer) -> HeldVersion | None:
        """Gets this version, or gives it up when the directory has no source of it now."""
        digests = offer.shares or (offer.digest,)
        contents: list[Content] = []
        self._holder.pool.expect(len(digests))
        partials: list[Partial] = []
        for part, digest in enumerate(digests):
            content = self._held_part(digest)
            if content is None:
                partial = self._partials.setdefault(digest, Partial(digest, self._layout, self._holder.pool))
                content = await self._complete(partial, offer, part)
                if content is None:
                    return None
                partials.append(partial)
            contents.append(content)
        known = self._holder.contents
        if any(known.get((offer.version, part)) is not content for part, content in enumerate(contents)):
            await self._commit(offer, contents, partials)
        for digest in digests:
            self._holder.arriving.pop(digest, None)
        self._partials.clear()
        return HeldVersion(offer.version, offer.digest, sum(content.size for content in contents), tuple(contents))

    def _held_part(self, digest: str) -> Content | None:
        partial = self._partials.get(digest)
        return (partial.finished if partial is not None else None) or self._holder.find(digest)

    async def _complete(self, partial: Partial, offer: Offer, part: int) -> Content | None:
        while not partial.done:
            assignment = await self._directory.assign(
                offer.version, wait_s=PLACE_WAIT_S, part=part, layout=self._key, host=self._holder.host
            )
            if assignment is None or assignment.digest != partial.digest:
                return None
            if await self._pull_from(assignment, partial):
                if offer.parts > 1:  # else the announcement follows at once, and says it as well
                    await self._directory.release(assignment.source, part=part)
                continue
            newest = await self._directory.newest(step=offer.version.step, layout=self._key)
            if newest is None or newest.digest != offer.digest:
                return None  # it is outdated or gone; begin again with what there is
        return partial.finished

    async def _commit(self, offer: Offer, contents: list[Content], partials: list[Partial]) -> None:
        began = min((partial.began for partial in partials), default=time.monotonic())
        await self._holder.add(offer.version, dict(enumerate(contents)), len(contents))
        self._emit(
            events.VersionCommitted(
                version=str(offer.version),
                digest=offer.digest,
                member=str(self.identity.member),
                incarnation=self.identity.incarnation,
                sources=all_sources(partials),
                transport=all_transports(partials),
                bytes=sum(partial.pulled for partial in partials),
                seconds=round(time.monotonic() - began, 6),
                staged=sum(partial.staged for partial in partials),
            )
        )

    def _refuse_replaced(self, source: Identity) -> bool:
        """Whether `source` is an older incarnation than one we have met."""
        newest = self._floors.get(source.member, 0)
        if source.incarnation >= newest:
            self._floors[source.member] = source.incarnation
            return False
        self.refused_sources += 1
        why = f"incarnation {newest} has taken over"
        self._emit(events.Refused(what="weights.source", identity=str(source), why=why))
        return True

    async def _pull_from(self, assignment: Assignment, partial: Partial) -> bool:
        """Pulls what is missing from one source. False when it could not give all of it."""
        source, part = assignment.source, assignment.part
        failure: Exception | None = None
        try:
            if self._refuse_replaced(source):
                await asyncio.sleep(0.05)  # the directory will hear of it
                raise TransportError("the source is an older incarnation")
            await self._drain(assignment, partial)
        except ContentGoneError:
            await self._directory.release(source, gone=True, part=part)
            await asyncio.sleep(0.02)  # its announcement is on the way
            return False
        except (FencedError, StagingError):
            await self._let_go(assignment)
            raise
        except (RobustError, OSError) as error:  # a TimeoutError is an OSError
            failure = error
            failure.__traceback__ = None
            if isinstance(error, CorruptChunkError):
                self.corrupt_chunks += 1
        except asyncio.CancelledError:
            await self._let_go(assignment)
            raise
        if failure is None:
            return True
        why = f"{partial.progress()}: {str(failure) or f'nothing came within {self._config.timeout_s:g} s'}"
        log.warning("%s: source %s of version %s failed: %s", self.identity, source, assignment.version, why)
        await self._directory.release(source, failed=True, why=why, part=part)
        return False

    async def _let_go(self, assignment: Assignment) -> None:
        with contextlib.suppress(RobustError, OSError, asyncio.CancelledError):
            async with asyncio.timeout(0.5):
                await self._directory.release(assignment.source, part=assignment.part)

    async def _drain(self, assignment: Assignment, partial: Partial) -> None:
        async with self._meet(assignment) as (transport, session):
            try:
                async with asyncio.timeout(self._limit_s(assignment)):
                    encoded = await session.open(assignment.digest)
                manifest = await asyncio.to_thread(partial.describe, encoded)
                lent = session.lend(manifest.size)
                if lent is not None:
                    await self._check_lent(assignment, partial, lent, transport)
                    return
                content = await partial.stage(list(self._holder.contents.values()))
                view: Any = content.buffer.view
                groups = plan_ranges(partial.missing, min(RANGE_BYTES, manifest.size // RANGES_AT_LEAST))
                landing = session.read([wanted for wanted, _ in groups], view)
                async with self._place_kept(assignment, content, len(groups)) as place:
                    await self._check(assignment, partial, groups, landing, view, transport, place, partial.landed)
            finally:
                await session.close()
                if session.tainted:
                    partial.taint()

    def _limit_s(self, assignment: Assignment) -> float:
        """How long to wait for a range. Who is further down in a chain of relays waits longer: when one of them fails,
        only the one after it shall notice, and not all of those behind."""
        return self._config.timeout_s * (1 + assignment.depth / 16)

    @contextlib.asynccontextmanager
    async def _place_kept(self, assignment: Assignment, content: Content, ranges: int) -> AsyncIterator[_Place]:
        """While it lasts the directory hears that we are at it, and that others may pull what has arrived. It is told
        at the side: the pull itself waits for nothing."""
        endpoints = self._holder.relay_endpoints if ranges > 1 else {}
        if endpoints:
            self._holder.arriving[content.digest] = content
        place = _Place()
        telling = asyncio.create_task(self._keep(place, assignment, endpoints))
        try:
            yield place
        finally:
            telling.cancel()
            await asyncio.wait([telling])

    async def _keep(self, place: _Place, assignment: Assignment, endpoints: dict[str, str]) -> None:
        source, version, part = assignment.source, assignment.version, assignment.part
        while not place.lost:
            try:
                if endpoints:
                    await self._directory.relay(endpoints, version, assignment.digest, part=part, layout=self._key)
                    endpoints = {}
                await asyncio.sleep(RENEW_S)
                place.lost = not await self._directory.renew(source, part)
            except (DeadlineError, PeerGoneError) as error:
                log.debug("%s: the directory does not hear of our pull: %s", self.identity, error)  # it may flow on
            except RobustError as error:
                log.warning("%s: the directory refuses our pull of %s: %s", self.identity, version, error)
                place.lost = True

    @contextlib.asynccontextmanager
    async def _meet(self, assignment: Assignment) -> AsyncIterator[tuple[str, Session]]:
        """A session over the best transport that works between the two."""
        source = assignment.source
        notes: list[str] = []
        ours = [
            name
            for name, transport in self._holder.transports.items()
            if not assignment.depth or transport.relays_early
        ]
        for choice in choose(ours, assignment.endpoints):
            transport = self._holder.transports[choice.transport]
            try:
                session = await transport.connect(assignment.endpoints[choice.transport])
            except (TransportError, WireError) as error:
                if isinstance(error, FencedError):
                    raise
                notes.append(f"{choice.transport} failed ({error})")
                continue
            if (source, choice.transport) not in self._told:
                self._told.add((source, choice.transport))
                why = "; ".join([*notes, choice.why])
                self._emit(events.TransportChosen(peer=str(source), transport=choice.transport, why=why))
            yield choice.transport, session
            return
        raise TransportError(f"cannot connect to {source}", why="; ".join(notes))

    async def _check_lent(self, assignment: Assignment, partial: Partial, lent: Mapped, transport: str) -> None:
        """Verifies all that is needed where it lies in the source's memory. What is staged stays as it is."""
        groups = plan_ranges(partial.needed, 4 * RANGE_BYTES)
        try:
            there = _all_there(groups)
            await self._check(assignment, partial, groups, there, lent.view, transport, _Place(), lambda count: None)
        except BaseException:
            lent.close()
            raise
        partial.borrow(lent)

    async def _check(
        self,
        assignment: Assignment,
        partial: Partial,
        groups: list[tuple[Range, list[Piece]]],
        landing: AsyncIterator[Range],
        view: Memory,
        transport: str,
        place: _Place,
        landed: Callable[[int], None],
    ) -> None:
        """Verifies ranges as they land, and tells `landed` of how many chunks; those after them arrive meanwhile."""
        checks: deque[tuple[asyncio.Future[None], Range, list[Piece]]] = deque()
        limit = self._limit_s(assignment)

        async def settle() -> None:
            check, wanted, pieces = checks[0]
            await check
            checks.popleft()
            landed(len(pieces))
            self._count(assignment, partial, wanted, transport)

        try:
            for wanted, pieces in groups:
                async with asyncio.timeout(limit):
                    await anext(landing)
                checks.append((asyncio.ensure_future(asyncio.to_thread(_verify_all, pieces, view)), wanted, pieces))
                while len(checks) >= self._config.credits or (checks and checks[0][0].done()):
                    await settle()
                if place.lost:
                    raise TransportError("the source was replaced while we pulled from it")
            while checks:
                await settle()
        finally:
            await asyncio.gather(*(check for check, _, _ in checks), return_exceptions=True)

    def _count(self, assignment: Assignment, partial: Partial, wanted: Range, transport: str) -> None:
        partial.pulled += wanted.length
        self.pulled_bytes += wanted.length
        if str(assignment.source) not in partial.sources:
            partial.sources.append(str(assignment.source))
        if transport not in partial.transports:
            partial.transports.append(transport)


async def _all_there(groups: list[tuple[Range, list[Piece]]]) -> AsyncIterator[Range]:
    for wanted, _ in groups:
        yield wanted


def _verify_all(pieces: list[Piece], view: Memory) -> None:
    for piece in pieces:
        verify(piece, view)
