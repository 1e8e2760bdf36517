"""The trainer's side: freeze a version, serve it, announce it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from robustrl import events
from robustrl.config import ReconnectConfig
from robustrl.errors import DeadlineError, WeightError
from robustrl.events import Emit
from robustrl.reconnect.content import freeze
from robustrl.reconnect.holder import Holder
from robustrl.reconnect.memory import MemoryReport
from robustrl.reconnect.service import DirectoryClient
from robustrl.reconnect.sharding import Slice
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

    async def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: Version,
        *,
        slices: Mapping[str, Slice] | None = None,
        part: int = 0,
        parts: int = 1,
    ) -> Published:
        """Copies the tensors and publishes the copy; the caller may change its tensors once this has returned.

        The copy runs in a thread: other work of the loop goes on. While the directory is away, the version is held
        and announced with the next `reannounce`.

        Args:
            tensors: what this rank has, by name.
            version: above all before.
            slices: for each tensor that is a part of a global one, which.
            part: this rank among the `parts` ranks that publish the version together. It can be pulled once all have.
            parts: see `part`.

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
            content = await asyncio.to_thread(freeze, tensors, self._config.chunk_bytes, self._holder.pool, slices)
            # The same weights under another version need no second copy.
            content = self._holder.find(content.digest) or content
            await self._holder.add(version, {part: content}, parts, publish=True)
        done = Published(version, content.digest, content.size, time.monotonic() - began)
        self._emit(
            events.VersionPublished(
                version=str(version), digest=done.digest, bytes=done.bytes, seconds=round(done.seconds, 6)
            )
        )
        return done

    async def released(self, version: Version, relays: int = 1, timeout: float = 30.0) -> bool:
        """Waits until `relays` members hold `version`: the trainer is not needed for it any more and may `drop` it.

        Returns False after `timeout` seconds.
        """
        end = time.monotonic() + timeout
        with contextlib.suppress(DeadlineError):
            while (left := end - time.monotonic()) > 0:
                if await self._holder.directory.relayed(version, relays, wait_s=left):
                    return True
        return False

    async def drop(self, version: Version) -> None:
        """Serves `version` no more. Its memory is used again as soon as nobody reads it any more."""
        await self._holder.drop(version)

    def held(self) -> list[Version]:
        """The versions that are served, oldest first."""
        return self._holder.held()

    async def reannounce(self) -> None:
        """Tells the directory again what is held; to be called after each reconnect to its host."""
        await self._holder.announce()

    async def close(self) -> None:
        await self._holder.close()
