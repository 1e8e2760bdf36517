"""The receiver's side: pull a version whole or not at all, load it, and serve it on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from robustrl import events
from robustrl.config import ReconnectConfig
from robustrl.errors import (
    CorruptChunkError,
    DeadlineError,
    FencedError,
    PeerGoneError,
    ProtocolError,
    RobustError,
    TransportError,
    WeightMismatchError,
    WireError,
)
from robustrl.events import Emit
from robustrl.reconnect.content import Buffer, Content, load, verify
from robustrl.reconnect.directory import Assignment, Offer
from robustrl.reconnect.holder import Holder
from robustrl.reconnect.manifest import Manifest, Piece, Range, plan_ranges
from robustrl.reconnect.service import DirectoryClient
from robustrl.reconnect.transports import choose
from robustrl.reconnect.transports.base import ContentGoneError, Session
from robustrl.roles import Identity, Version
from robustrl.wire import Secret
from robustrl.wire.address import LOOPBACK

if TYPE_CHECKING:
    import torch

log = logging.getLogger("robustrl.reconnect")

RANGE_BYTES: Final = 8 << 20
"""Bytes asked for at once, where chunks are smaller."""
RENEW_S: Final = 5.0
"""How often a puller says that it is still at it."""
PLACE_WAIT_S: Final = 2.0
"""How long to wait for a free source before looking whether the version is still the one to have."""


class HeldVersion(NamedTuple):
    """A version that this member holds, verified. It stays usable for as long as someone refers to it."""

    version: Version
    digest: str
    bytes: int
    content: Content


class _Partial:
    """A version that is not whole yet: nobody but the puller sees it."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.began = time.monotonic()
        self.manifest: Manifest | None = None
        self.buffer: Buffer | None = None
        self.missing: deque[Piece] = deque()
        """In the order of the buffer."""
        self.sources: list[str] = []
        self.transports: list[str] = []
        self.pulled = 0

    def progress(self) -> str:
        if self.manifest is None:
            return "before the manifest"
        chunks = len(self.manifest.pieces())
        return f"after {chunks - len(self.missing)} of {chunks} chunks"

    def prepare(self, manifest: Manifest, others: list[Content]) -> None:
        """Takes memory for the version and copies what other versions have of it."""
        self.buffer = Buffer(manifest.size)
        self.manifest = manifest
        known: dict[bytes, tuple[Content, Piece]] = {}
        for content in others:
            known.update((piece.digest, (content, piece)) for piece in content.manifest.pieces())
        for piece in manifest.pieces():
            found = known.get(piece.digest)
            if found is None or found[1].length != piece.length:
                self.missing.append(piece)
                continue
            there = found[0].buffer.view[found[1].start : found[1].start + piece.length]
            self.buffer.view[piece.start : piece.start + piece.length] = there


class WeightSubscriber:
    """Pulls weight versions and serves them on. All calls but `apply` on one event loop, which goes on between them.

    Args:
        identity: the member's.
        directory: says who holds what.
        config: transport, versions kept, deadline of a range.
        secret: the job's secret.
        emit: takes `events.VersionCommitted` and `events.TransportChosen`.
        host: the address to serve on.
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
        on_apply: Callable[[HeldVersion], None] | None = None,
    ) -> None:
        self.identity = identity
        self._on_apply = on_apply
        self._applied: HeldVersion | None = None
        self._applying = threading.Lock()
        self._holder = Holder(identity, directory, config, secret, emit, host=host, origin=False)
        self._directory = directory
        self._config = config
        self._emit = emit
        self._pulling = asyncio.Lock()
        self._pulls: set[asyncio.Task[HeldVersion | None]] = set()
        self._closed = False
        self._partial: _Partial | None = None
        self._told: set[tuple[Identity, str]] = set()
        self.corrupt_chunks = 0
        """Chunks that did not have their digest and were pulled again elsewhere."""
        self.pulled_bytes = 0
        """Bytes of verified chunks that came from others."""

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
                    offer = await self._directory.newest(newer_than, step, wait_s=timeout)
                    async with self._pulling:
                        if self._partial is not None and (offer is None or offer.digest != self._partial.digest):
                            self._partial = None  # half a version that nobody has any more, or that is outdated
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
                digest = load(held.content, target)
            except WeightMismatchError:
                self._applied = before
                raise
            if self._on_apply is not None:
                self._on_apply(held)
            self._applied = held
        return digest

    async def adopt(self, held: HeldVersion) -> None:
        """Takes over a version that this process held as another member, and serves it."""
        await self._holder.add(held.version, held.content)

    async def reannounce(self) -> None:
        """Tells the directory again what is held; to be called after each reconnect to its host."""
        await self._holder.announce()

    async def close(self) -> None:
        """Ends pulls that are under way, says goodbye and serves no more."""
        self._closed = True
        for task in self._pulls:
            task.cancel()
        await asyncio.gather(*self._pulls, return_exceptions=True)
        await self._holder.close()
        self._partial = None

    # -----------------------------------------------------------------------------------------------------------

    async def _take(self, offer: Offer) -> HeldVersion | None:
        """Gets this version, or gives it up when the directory has no source of it now."""
        content = self._holder.contents.get(offer.version)
        if content is None or content.digest != offer.digest:
            content = self._holder.find(offer.digest)
            partial = _Partial(offer.digest)
            if content is None:
                if self._partial is None or self._partial.digest != offer.digest:
                    self._partial = partial
                partial = self._partial
                content = await self._complete(partial, offer)
                if content is None:
                    return None
            await self._commit(offer.version, content, partial)
        return HeldVersion(offer.version, content.digest, content.size, content)

    async def _complete(self, partial: _Partial, offer: Offer) -> Content | None:
        while partial.manifest is None or partial.missing:
            assignment = await self._directory.assign(offer.version, wait_s=PLACE_WAIT_S)
            if assignment is None or assignment.digest != offer.digest:
                return None
            if await self._pull_from(assignment, partial):
                continue
            newest = await self._directory.newest(step=offer.version.step)
            if newest is None or newest.digest != offer.digest:
                return None  # it is outdated or gone; begin again with what there is
        assert partial.manifest is not None and partial.buffer is not None
        return Content(partial.manifest, partial.buffer)

    async def _commit(self, version: Version, content: Content, partial: _Partial) -> None:
        await self._holder.add(version, content)
        self._partial = None
        self._emit(
            events.VersionCommitted(
                version=str(version),
                digest=content.digest,
                member=str(self.identity.member),
                incarnation=self.identity.incarnation,
                sources=tuple(partial.sources),
                transport="+".join(partial.transports),
                bytes=partial.pulled,
                seconds=round(time.monotonic() - partial.began, 6),
            )
        )

    async def _pull_from(self, assignment: Assignment, partial: _Partial) -> bool:
        """Pulls what is missing from one source. False when it could not give all of it."""
        source = assignment.source
        failure: Exception | None = None
        try:
            await self._drain(assignment, partial)
        except ContentGoneError:
            await self._directory.release(source)
            await asyncio.sleep(0.02)  # its announcement is on the way
            return False
        except FencedError:
            raise
        except (RobustError, OSError) as error:  # a TimeoutError is an OSError
            failure = error
            failure.__traceback__ = None
            if isinstance(error, CorruptChunkError):
                self.corrupt_chunks += 1
        except asyncio.CancelledError:
            await self._let_go(source)
            raise
        why = ""
        if failure is not None:
            why = f"{partial.progress()}: {str(failure) or f'nothing came within {self._config.timeout_s:g} s'}"
            log.warning("%s: source %s of version %s failed: %s", self.identity, source, assignment.version, why)
        await self._directory.release(source, failed=failure is not None, why=why)
        return failure is None

    async def _let_go(self, source: Identity) -> None:
        with contextlib.suppress(RobustError, OSError, asyncio.CancelledError):
            async with asyncio.timeout(0.5):
                await self._directory.release(source)

    async def _drain(self, assignment: Assignment, partial: _Partial) -> None:
        async with self._meet(assignment) as (transport, session):
            async with asyncio.timeout(self._config.timeout_s):
                encoded = await session.open(assignment.digest)
            if partial.manifest is None:
                await asyncio.to_thread(self._prepare, partial, encoded)
            await self._read(assignment, partial, session, transport)

    @contextlib.asynccontextmanager
    async def _meet(self, assignment: Assignment) -> AsyncIterator[tuple[str, Session]]:
        """A session over the best transport that works between the two."""
        source = assignment.source
        notes: list[str] = []
        for choice in choose(list(self._holder.transports), assignment.endpoints):
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
            try:
                yield choice.transport, session
            finally:
                await session.close()
            return
        raise TransportError(f"cannot connect to {source}", why="; ".join(notes))

    def _prepare(self, partial: _Partial, encoded: bytes) -> None:
        """Reads the manifest and takes memory for it, only if it is the one that the directory vouches for."""
        manifest = Manifest.decode(encoded)
        if manifest.digest() != partial.digest:
            raise ProtocolError(
                "the source gave another manifest than was announced",
                why=f"its digest is {manifest.digest()}, not {partial.digest}",
            )
        partial.prepare(manifest, list(self._holder.contents.values()))

    async def _read(self, assignment: Assignment, partial: _Partial, session: Session, transport: str) -> None:
        assert partial.buffer is not None
        view = partial.buffer.view
        groups = plan_ranges(partial.missing, RANGE_BYTES)
        renewed = time.monotonic()
        landed = aiter(session.read([wanted for wanted, _ in groups], view))
        for wanted, pieces in groups:
            async with asyncio.timeout(self._config.timeout_s):
                await anext(landed)
            await asyncio.to_thread(_verify_all, pieces, view)
            for _ in pieces:
                partial.missing.popleft()
            self._count(assignment, partial, wanted, transport)
            if time.monotonic() - renewed > RENEW_S:
                renewed = time.monotonic()
                with contextlib.suppress(DeadlineError, PeerGoneError):
                    await self._directory.renew(assignment.source)

    def _count(self, assignment: Assignment, partial: _Partial, wanted: Range, transport: str) -> None:
        partial.pulled += wanted.length
        self.pulled_bytes += wanted.length
        if str(assignment.source) not in partial.sources:
            partial.sources.append(str(assignment.source))
        if transport not in partial.transports:
            partial.transports.append(transport)


def _verify_all(pieces: list[Piece], view: memoryview) -> None:
    for piece in pieces:
        verify(piece, view)
