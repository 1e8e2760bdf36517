"""What publishers and subscribers share: a member holds versions, serves them, and tells the directory so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from robustrl.config import ReconnectConfig
from robustrl.errors import DeadlineError, PeerGoneError, RobustError
from robustrl.events import Emit
from robustrl.reconnect import cuda, transports
from robustrl.reconnect.content import Content
from robustrl.reconnect.directory import Key, Offer
from robustrl.reconnect.memory import MemoryReport, Pool
from robustrl.reconnect.service import DirectoryClient
from robustrl.reconnect.transports.shm import host_key
from robustrl.roles import Identity, Version
from robustrl.wire import Secret
from robustrl.wire.address import LOOPBACK

log = logging.getLogger("robustrl.reconnect")


class Holder:
    """Keeps the newest versions, serves them over every transport that is configured, and announces them."""

    def __init__(
        self,
        identity: Identity,
        directory: DirectoryClient,
        config: ReconnectConfig,
        secret: Secret,
        emit: Emit,
        *,
        host: str = LOOPBACK,
        origin: bool,
        layout: str = "",
    ) -> None:
        self.identity = identity
        self.directory = directory
        self.config = config
        self.emit = emit
        self.origin = origin
        self.layout = layout
        self.transports = transports.make(config, identity, secret, host)
        self.pool = Pool(config.staging_bytes, identity, cuda.device_driver() if config.memory == "device" else None)
        self.endpoints: dict[str, str] = {}
        self.contents: dict[Key, Content] = {}
        self.arriving: dict[str, Content] = {}
        """By digest, what is still being pulled and is given on already."""
        self.parts: dict[Version, int] = {}
        self._announcing = asyncio.Lock()

    @property
    def served_bytes(self) -> int:
        """Bytes of weights that pullers were given."""
        return sum(transport.served_bytes for transport in self.transports.values())

    def memory_report(self) -> MemoryReport:
        distinct = {content.digest: content.size for content in list(self.contents.values())}
        return MemoryReport(
            held=sum(distinct.values()),
            own=self.pool.own,
            idle=self.pool.idle,
            mapped=sum(transport.mapped_bytes for transport in self.transports.values()),
            peak=self.pool.peak,
        )

    async def start(self) -> None:
        for name, transport in self.transports.items():
            self.endpoints[name] = await transport.serve(self.offered)

    def find(self, digest: str) -> Content | None:
        """The content of this digest, if it is held."""
        return next((content for content in list(self.contents.values()) if content.digest == digest), None)

    def offered(self, digest: str) -> Content | None:
        """The content of this digest, if it is held or arriving."""
        return self.find(digest) or self.arriving.get(digest)

    @property
    def host(self) -> str:
        """What members share who can map each other's memory; empty where shared memory is not used."""
        return host_key() if "shm" in self.transports else ""

    @property
    def relay_endpoints(self) -> dict[str, str]:
        """Where a content can be had that is still arriving."""
        return {name: place for name, place in self.endpoints.items() if self.transports[name].relays_early}

    def held(self) -> list[Version]:
        return sorted({version for version, _ in self.contents})

    async def add(
        self, version: Version, contents: Mapping[int, Content], parts: int = 1, *, publish: bool = False
    ) -> None:
        """Holds one version more, or some parts of one, and the oldest less.

        While the directory is away the version is held all the same; `announce` makes up for it.

        Args:
            version: whose.
            contents: by the number of the part.
            parts: how many the version has in all.
            publish: whether they are new with us.

        Raises:
            FencedError, WeightError: the directory refused the version; it is not held then.
        """
        async with self._announcing:
            before, parts_before = self.contents, self.parts
            both = {**before, **{(version, part): content for part, content in contents.items()}}
            newest = sorted({version for version, _ in both})[-self.config.keep_versions :]
            kept = {key: content for key, content in both.items() if key[0] in newest}
            self.contents = both  # what falls out is served until the directory sends nobody to it any more
            self.parts = {**parts_before, version: parts}
            try:
                await self._announce(kept, version if publish else None)
            except (DeadlineError, PeerGoneError) as error:
                log.warning("%s: version %s is not announced yet: %s", self.identity, version, error)
            except BaseException:
                self.contents, self.parts = before, parts_before
                raise
            self._keep(kept)

    async def drop(self, version: Version) -> None:
        """Holds `version` no more."""
        async with self._announcing:
            kept = {key: content for key, content in self.contents.items() if key[0] != version}
            await self._announce(kept, None)
            self._keep(kept)

    def _keep(self, kept: dict[Key, Content]) -> None:
        self.contents = kept
        self.parts = {version: self.parts[version] for version, _ in kept}

    async def announce(self) -> None:
        """Says again what is held: the directory may have been restarted empty."""
        async with self._announcing:
            await self._announce(self.contents, None)

    async def _announce(self, contents: Mapping[Key, Content], publish: Version | None) -> None:
        held = [
            Offer(
                version,
                content.digest,
                content.size,
                part,
                self.parts[version],
                self.layout if content.pieces is not None else "",
            )
            for (version, part), content in sorted(contents.items(), key=lambda entry: entry[0])
        ]
        await self.directory.announce(self.endpoints, held, origin=self.origin, publish=publish, host=self.host)

    async def close(self) -> None:
        """Says goodbye if the directory is there, and serves no more."""
        try:
            async with asyncio.timeout(1.0):
                await self.directory.retire()
        except (RobustError, OSError) as error:
            log.debug("%s: no goodbye: %s", self.identity, error)
        for transport in self.transports.values():
            await transport.close()
        self.contents, self.parts, self.arriving = {}, {}, {}
        self.pool.clear()
