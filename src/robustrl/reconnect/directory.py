"""Who holds which version, and who pulls from whom: a pure state machine.

It is soft state. When its process is lost it starts empty, and every holder says again what it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from robustrl.errors import FencedError, WeightError
from robustrl.reconnect.manifest import version_digest
from robustrl.roles import Identity, Member, Version

Text = Annotated[str, msgspec.Meta(max_length=1024)]

REMEMBERED_VERSIONS = 4096
"""Versions without a holder whose digest stays known, the newest ones."""


MAX_PARTS = 1 << 16
"""Publishers of one version at the most."""

Key = tuple[Version, int]
"""A part of a version."""


class Offer(msgspec.Struct, frozen=True):
    """A version that someone holds, or one of the `parts` that its publishers made.

    `digest` and `bytes` are those of the part. `layout` is empty where all of the part is held; else it is the key of
    the receivers' layout whose chunks are. In the directory's answer `shares` are the digests of the parts, in order,
    where there are several; `digest` and `bytes` are then those of the version.
    """

    version: Version
    digest: Text
    bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    part: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PARTS)] = 0
    parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARTS)] = 1
    layout: Text = ""
    shares: tuple[Text, ...] = ()


class Assignment(msgspec.Struct, frozen=True):
    """From whom a puller gets a version: `endpoints` by transport."""

    source: Identity
    endpoints: dict[Text, Text]
    version: Version
    digest: Text
    part: int = 0


class _Holder(msgspec.Struct):
    endpoints: dict[str, str]
    held: dict[Key, Offer]
    origin: bool


class Directory:
    """Holders, versions, and pullers.

    Args:
        pullers_per_source: how many may pull from one source at a time.
        lease_s: seconds after which a puller that is not heard of no longer counts against its source.
        avoid_s: seconds for which a source that failed someone is avoided.
    """

    def __init__(self, *, pullers_per_source: int = 2, lease_s: float = 30.0, avoid_s: float = 10.0) -> None:
        self.pullers_per_source = pullers_per_source
        self.lease_s = lease_s
        self.avoid_s = avoid_s
        self.refused: Counter[str] = Counter()
        """What was refused, by identity."""
        self._floor: dict[Member, int] = {}
        self._holders: dict[Identity, _Holder] = {}
        self._digests: dict[Key, str] = {}
        self._parts: dict[Version, int] = {}
        self._high: Version | None = None
        self._pullers: dict[Identity, dict[tuple[Identity, int], float]] = {}
        self._failed: dict[tuple[Identity, Identity], float] = {}
        self._suspect: dict[Identity, float] = {}

    # -- fencing ------------------------------------------------------------------------------------------------

    def fence(self, member: Member, incarnation: int) -> None:
        """Forgets every incarnation of `member` older than `incarnation`; what they say from now on is refused."""
        if incarnation <= self._floor.get(member, 0):
            return
        self._floor[member] = incarnation
        for who in [who for who in self._known() if who.member == member and who.incarnation < incarnation]:
            self.retire(who)

    def check(self, who: Identity) -> None:
        """Raises FencedError for an older incarnation; a newer one than was known fences those before it."""
        floor = self._floor.get(who.member, 0)
        if who.incarnation < floor:
            self.refused[str(who)] += 1
            raise FencedError(
                "an older incarnation spoke about weights", who=who, why=f"incarnation {floor} has taken over"
            )
        self.fence(who.member, who.incarnation)

    # -- holders ------------------------------------------------------------------------------------------------

    def announce(
        self,
        who: Identity,
        endpoints: Mapping[str, str],
        held: Sequence[Offer],
        *,
        origin: bool,
        publish: Version | None = None,
    ) -> None:
        """`who` says all that it holds; what it held before and does not name is forgotten.

        Args:
            origin: it makes versions (a publisher); relays are asked before it.
            publish: the one of `held` that is new with this announcement.

        Raises:
            FencedError: `who` is an older incarnation.
            WeightError: another digest for a known version, or a publication that is not above the newest. Nothing
                is changed then.
        """
        self.check(who)
        for offer in held:
            known = self._digests.get((offer.version, offer.part))
            parts = self._parts.get(offer.version, offer.parts)
            if offer.parts != parts or offer.part >= parts:
                self.refused[str(who)] += 1
                raise WeightError(
                    f"part {offer.part} of {offer.parts} was announced for version {offer.version}",
                    who=who,
                    why=f"it has {parts}",
                )
            if known is not None and known != offer.digest:
                self.refused[str(who)] += 1
                raise WeightError(
                    f"another content was announced for version {offer.version}",
                    who=who,
                    why=f"its digest is {known}, not {offer.digest}",
                )
        if publish is not None and publish not in self._parts and self._high is not None and not publish > self._high:
            self.refused[str(who)] += 1
            raise WeightError(
                f"version {publish} is not above the newest", who=who, why=f"{self._high} was published before"
            )
        for offer in held:
            self._digests[offer.version, offer.part] = offer.digest
            self._parts[offer.version] = offer.parts
            if self._high is None or offer.version > self._high:
                self._high = offer.version
        self._holders[who] = _Holder(dict(endpoints), {(offer.version, offer.part): offer for offer in held}, origin)
        self._suspect.pop(who, None)
        self._forget_old()

    def retire(self, who: Identity) -> None:
        """`who` serves and pulls no more."""
        self._holders.pop(who, None)
        self._pullers.pop(who, None)
        self._suspect.pop(who, None)
        for source, pullers in self._pullers.items():
            self._pullers[source] = {place: until for place, until in pullers.items() if place[0] != who}
        self._failed = {pair: until for pair, until in self._failed.items() if who not in pair}

    def holders(self, version: Version) -> list[Identity]:
        return sorted(who for who, holder in self._holders.items() if any(key[0] == version for key in holder.held))

    def relays(self, version: Version) -> int:
        """How many members that did not make `version` hold all of it, or all that receivers of their kind need."""
        parts = self._parts.get(version)
        if parts is None:
            return 0
        return sum(
            not holder.origin and all((version, part) in holder.held for part in range(parts))
            for holder in self._holders.values()
        )

    def newest(self, newer_than: Version | None = None, step: int | None = None, layout: str = "") -> Offer | None:
        """The newest version that is held, above `newer_than` and of `step` where they are given.

        A version of several parts is there when each part is held whole, or by a member of the caller's `layout`.
        """
        found: dict[Version, dict[int, Offer]] = {}
        for holder in self._holders.values():
            for offer in holder.held.values():
                version = offer.version
                if (
                    offer.layout in ("", layout)
                    and (newer_than is None or version > newer_than)
                    and (step is None or version.step == step)
                ):
                    found.setdefault(version, {})[offer.part] = offer
        complete = [version for version, parts in found.items() if len(parts) == self._parts[version]]
        if not complete:
            return None
        version = max(complete)
        parts = [offer for _, offer in sorted(found[version].items())]
        if len(parts) == 1:
            return Offer(version, parts[0].digest, parts[0].bytes)
        shares = tuple(offer.digest for offer in parts)
        return Offer(
            version, version_digest(shares), sum(offer.bytes for offer in parts), parts=len(parts), shares=shares
        )

    # -- pullers ------------------------------------------------------------------------------------------------

    def assign(
        self, puller: Identity, version: Version, now: float, part: int = 0, layout: str = ""
    ) -> Assignment | None:
        """A source of a part of `version` for `puller`, or None while every source is busy, avoided or gone.

        Relays come before the publisher, sources that failed nobody before those that did, idle before busy. The
        place is the puller's until it releases it or `lease_s` passed without `renew`.
        """
        self.check(puller)
        best: tuple[tuple[object, ...], Identity] | None = None
        for source, holder in self._holders.items():
            offer = holder.held.get((version, part))
            if source == puller or offer is None or offer.layout not in ("", layout):
                continue
            if self._failed.get((puller, source), now) > now:
                continue
            places = self._pullers.get(source, {})
            others = {who for (who, _), until in places.items() if until > now and who != puller}
            if len(others) >= self.pullers_per_source:
                continue
            rank = (self._suspect.get(source, now) > now, holder.origin, len(others), source)
            if best is None or rank < best[0]:
                best = rank, source
        if best is None:
            return None
        source = best[1]
        self._pullers.setdefault(source, {})[puller, part] = now + self.lease_s
        holder = self._holders[source]
        return Assignment(source, dict(holder.endpoints), version, holder.held[version, part].digest, part)

    def renew(self, puller: Identity, source: Identity, now: float, part: int = 0) -> bool:
        """`puller` is still at it. False when `source` must not be read any more: a newer incarnation took over."""
        self.check(puller)
        if (puller, part) in self._pullers.get(source, {}):
            self._pullers[source][puller, part] = now + self.lease_s
        return source.incarnation >= self._floor.get(source.member, 0)

    def release(self, puller: Identity, source: Identity, now: float, *, failed: bool = False, part: int = 0) -> None:
        """`puller` needs `source` no more. When it `failed`, this puller avoids it for a while and others do
        while they have a choice."""
        self.check(puller)
        self._pullers.get(source, {}).pop((puller, part), None)
        if failed:
            self._failed = {pair: until for pair, until in self._failed.items() if until > now}
            self._failed[puller, source] = self._suspect[source] = now + self.avoid_s

    def places(self, member: Member) -> list[tuple[Identity, Identity]]:
        """(puller, source) for each place at a source that an incarnation of `member` has."""
        found = {
            (who, source) for source, pullers in self._pullers.items() for who, _ in pullers if who.member == member
        }
        return sorted(found)

    def next_change(self, now: float) -> float | None:
        """When an assignment that is refused now may succeed although nobody says anything, or None."""
        times = [*self._failed.values(), *(until for pullers in self._pullers.values() for until in pullers.values())]
        return min((time for time in times if time > now), default=None)

    # -----------------------------------------------------------------------------------------------------------

    def _known(self) -> set[Identity]:
        pullers = {who for pullers in self._pullers.values() for who, _ in pullers}
        return {*self._holders, *self._pullers, *pullers, *self._suspect}

    def _forget_old(self) -> None:
        if len(self._digests) <= REMEMBERED_VERSIONS:
            return
        held = {key for holder in self._holders.values() for key in holder.held}
        for key in sorted(self._digests)[:-REMEMBERED_VERSIONS]:
            if key not in held:
                del self._digests[key]
        known = {version for version, _ in self._digests}
        self._parts = {version: parts for version, parts in self._parts.items() if version in known}
