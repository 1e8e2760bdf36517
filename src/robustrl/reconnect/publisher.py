"""The trainer's side: freeze a version, serve it, announce it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from robustrl import events
from robustrl.config import ReconnectConfig
from robustrl.errors import WeightError
from robustrl.events import Emit
from robustrl.reconnect.content import freeze
from robustrl.reconnect.holder import Holder
from robustrl.reconnect.memory import MemoryReport
from robustrl.reconnect.service import DirectoryClient
from robustrl.roles import Identity, Version
from robustrl.wire import Secret
from robustrl.wire.address import LOOPBACK

if TYPE_CHECKING:
    import torch


class Published(msgspec.Struct, frozen=True):
    """A version that can be pulled now. `seconds` is the time the caller had to wait for it."""

    version: Version
    digest: str
    bytes: int
    seconds: float


class WeightPublisher:
    """Publishes weight versions. All calls on one event loop, which goes on running between them.

    Args:
        identity: the trainer's.
        directory: where versions are announced.
        config: transport, chunk size, versions kept.
        secret: the job's secret.
        emit: takes `events.VersionPublished`.
        host: the address to serve on.
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
    ) -> None:
        self._holder = Holder(identity, directory, config, secret, emit, host=host, origin=True)
        self._config = config
        self._emit = emit
        self._publishing = asyncio.Lock()

    @property
    def served_bytes(self) -> int:
        """Bytes of weights that pullers were given."""
        return self._holder.served_bytes

    def memory_report(self) -> MemoryReport:
        """What the versions held occupy."""
        return self._holder.memory_report()

    async def start(self) -> None:
        """Begins to serve. Raises MissingDependencyError or ConfigError when the transport cannot be had."""
        await self._holder.start()

    async def publish(self, tensors: Mapping[str, torch.Tensor], version: Version) -> Published:
        """Copies the tensors and publishes the copy; the caller may change its tensors once this has returned.

        The copy runs in a thread: other work of the loop goes on. While the directory is away, the version is held
        and announced with the next `reannounce`.

        Raises:
            FencedError: a newer incarnation has taken over.
            WeightError: a tensor cannot be published, or the version is not above the newest.
            StagingError: the copy does not fit `reconnect.staging_bytes` or the machine.
        """
        began = time.monotonic()
        async with self._publishing:
            held = self._holder.held()
            if held and version < held[-1]:
                raise WeightError(
                    f"version {version} is not above the newest", who=self._holder.identity, why=f"{held[-1]} is held"
                )
            content = await asyncio.to_thread(freeze, tensors, self._config.chunk_bytes, self._holder.pool)
            # The same weights under another version need no second copy.
            content = self._holder.find(content.digest) or content
            await self._holder.add(version, content, publish=True)
        done = Published(version, content.digest, content.size, time.monotonic() - began)
        self._emit(
            events.VersionPublished(
                version=str(version), digest=done.digest, bytes=done.bytes, seconds=round(done.seconds, 6)
            )
        )
        return done

    def held(self) -> list[Version]:
        """The versions that are served, oldest first."""
        return self._holder.held()

    async def reannounce(self) -> None:
        """Tells the directory again what is held; to be called after each reconnect to its host."""
        await self._holder.announce()

    async def close(self) -> None:
        await self._holder.close()
