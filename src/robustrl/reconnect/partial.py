"""One part of a version on its way to a puller. Others are given what of it has been verified, and nobody loads it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from robustrl.errors import ProtocolError
from robustrl.reconnect.arrival import Arrival
from robustrl.reconnect.content import Content
from robustrl.reconnect.manifest import Manifest, Piece, cover
from robustrl.reconnect.memory import Buffer, DeviceBuffer, Mapped, Pool
from robustrl.reconnect.sharding import Layout, needed


class Partial:
    """What has been pulled of the content `digest`, and where to.

    Args:
        digest: of the content.
        layout: what of it is needed; None for all.
        pool: where its staging buffer comes from and goes back to.
    """

    def __init__(self, digest: str, layout: Layout | None, pool: Pool) -> None:
        self.digest = digest
        self.began = time.monotonic()
        self.manifest: Manifest | None = None
        self.missing: deque[Piece] = deque()
        """In the order of the buffer."""
        self.sources: list[str] = []
        self.transports: list[str] = []
        self.pulled = 0
        self.staged = 0
        """Bytes of memory that it took."""
        self._layout = layout
        self._pool = pool
        self._needed: list[Piece] = []
        self._content: Content | None = None
        self._again = _Again()

    def progress(self) -> str:
        if self.manifest is None:
            return "before the manifest"
        return f"after {len(self._needed) - len(self.missing)} of {len(self._needed)} chunks"

    @property
    def needed(self) -> list[Piece]:
        return self._needed

    @property
    def done(self) -> bool:
        return self._content is not None and not self.missing

    @property
    def finished(self) -> Content | None:
        """What came of it, once nothing is missing. A version of several parts may have to wait for the others."""
        return self._content if self.done else None

    @property
    def whole(self) -> bool:
        """Whether all chunks of the content are needed here, not only some."""
        return self.manifest is not None and len(self._needed) == len(self.manifest.pieces())

    def describe(self, encoded: bytes) -> Manifest:
        """Reads the manifest that a source gave, if it is the one that the directory vouches for."""
        if self.manifest is None:
            manifest = Manifest.decode(encoded)
            if manifest.digest() != self.digest:
                raise ProtocolError(
                    "the source gave another manifest than was announced",
                    why=f"its digest is {manifest.digest()}, not {self.digest}",
                )
            self._needed = needed(manifest, self._layout)
            self.missing.extend(self._needed)
            self.manifest = manifest
        return self.manifest

    async def stage(self, others: list[Content]) -> Content:
        """What is pulled, with the memory to pull it into; what other versions have of it is copied at once.

        Raises StagingError when there is no memory.
        """
        if self._content is None:
            taking = asyncio.create_task(asyncio.to_thread(self._take, others))
            try:
                buffer = await asyncio.shield(taking)
            except asyncio.CancelledError:
                await asyncio.wait([taking])  # nobody may write into a buffer that was given back
                if not taking.cancelled() and taking.exception() is None:
                    self._use(taking.result())
                raise
            self._use(buffer)
        assert self._content is not None
        return self._content

    def _use(self, buffer: Buffer | DeviceBuffer) -> None:
        assert self.manifest is not None
        pool, again = self._pool, self._again
        self._content = Content(
            self.manifest,
            buffer,
            lambda: pool.give(buffer, again=again.yes),
            None if self.whole else self._needed,
            Arrival(),
        )
        self.staged = buffer.bytes
        self._advance()

    def landed(self, count: int) -> None:
        """The first `count` missing chunks are in the staging memory and verified: they are given on."""
        for _ in range(count):
            self.missing.popleft()
        self._advance()

    def _advance(self) -> None:
        if self._content is not None and self._content.arrival is not None:
            self._content.arrival.advance(self.missing[0].start if self.missing else self._content.size)

    def _take(self, others: list[Content]) -> Buffer | DeviceBuffer:
        assert self.manifest is not None
        spans = None if self.whole else tuple((span.start, span.length) for span in cover(self._needed))
        buffer = self._pool.take(self.manifest.size, spans)
        known: dict[bytes, tuple[Content, Piece]] = {}
        for content in others:
            present = content.manifest.pieces() if content.pieces is None else content.pieces
            known.update((piece.digest, (content, piece)) for piece in present)
        missing: list[Piece] = []
        known_here: list[tuple[Any, Any]] = []
        for piece in self._needed:
            found = known.get(piece.digest)
            if found is None or found[1].length != piece.length:
                missing.append(piece)
                continue
            there = found[0].buffer.view[found[1].start : found[1].start + piece.length]
            known_here.append((buffer.view[piece.start : piece.start + piece.length], there))
        buffer.put(known_here)
        self.missing = deque(missing)
        return buffer

    def taint(self) -> None:
        """Something may write into the staging memory later on: it must not be used for another content."""
        self._again.yes = False

    def borrow(self, lent: Mapped) -> None:
        """All of it was verified where it lies in a peer's memory; nothing is missing."""
        assert self.manifest is not None
        self.drop()
        self.staged = 0
        self._content = Content(self.manifest, lent, lent.close, None if self.whole else self._needed)
        self.missing.clear()

    def drop(self) -> None:
        """Pulls no more: those who were given what there is hear of it. The memory is free when nobody reads it."""
        if self._content is not None and self._content.arrival is not None and not self._content.arrived:
            self._content.arrival.give_up()
        self._content = None


class _Again:
    """Whether a buffer may be used again."""

    yes = True


def all_sources(partials: Iterable[Partial]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(source for partial in partials for source in partial.sources))


def all_transports(partials: Iterable[Partial]) -> str:
    return "+".join(dict.fromkeys(name for partial in partials for name in partial.transports))
