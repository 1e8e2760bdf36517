"""Who holds which version, and who pulls from whom: a pure state machine.

It is soft state. When its process is lost it starts empty, and every holder says again what it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from robustrl.errors import FencedError, WeightError
from robustrl.reconnect.manifest import version_digest
from robustrl.roles import Identity, Member, Version

Text = Annotated[str, msgspec.Meta(max_length=1024)]

REMEMBERED_VERSIONS = 4096
"""Versions without a holder whose digest stays known, the newest ones."""


MAX_PARTS = 1 << 16
"""Publishers of one version at the most."""

MAX_DEPTH = 8
"""Pullers in a chain at the most, each of which gives on to the next what it has got so far. Longer chains finish
little sooner, and each member more is one that all after it wait for when it is slow."""

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
    """From whom a puller gets a version: `endpoints` by transport.

    `depth` is 0 where the source holds all of it. Else it is pulling it itself, and gives on what it has got: `depth`
    sources stand between it and one that holds all.
    """

    source: Identity
    endpoints: dict[Text, Text]
    version: Version
    digest: Text
    part: int = 0
    depth: Annotated[int, msgspec.Meta(ge=0, le=MAX_DEPTH)] = 0


class _Holder(msgspec.Struct):
    endpoints: dict[str, str]
    held: dict[Key, Offer]
    origin: bool
    host: str


class _Relay(msgspec.Struct):
    """Someone who gives on what it has not got whole yet."""

    endpoints: dict[str, str]
    digest: str
    layout: str


class _Place(msgspec.Struct):
    """At which source a puller is. `mapped`: it reads the source's memory, which costs the source nothing."""

    source: Identity
    version: Version
    until: float
    mapped: bool


class _Candidate(NamedTuple):
    source: Identity
    endpoints: dict[str, str]
    digest: str
    depth: int
    origin: bool
    mapped: bool


class Directory:
    """Holders, versions, and pullers.

    Args:
        pullers_per_source: how many may pull from one source at a time, those that map its memory not counted. With
            one, pullers form a chain, and each link carries a version once.
        lease_s: seconds after which a puller that is not heard of no longer counts against its source.
        avoid_s: seconds for which a source that failed someone is avoided.
    """

    def __init__(self, *, pullers_per_source: int = 1, lease_s: float = 2.0, avoid_s: float = 10.0) -> None:
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
        self._relays: dict[Identity, dict[Key, _Relay]] = {}
        self._places: dict[tuple[Identity, int], _Place] = {}
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
        host: str = "",
    ) -> None:
        """`who` says all that it holds; what it held before and does not name is forgotten.

        Args:
            origin: it makes versions (a publisher); relays are asked before it.
            host: pullers of the same host can map its memory; empty where none can.
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
        kept = {(offer.version, offer.part): offer for offer in held}
        self._holders[who] = _Holder(dict(endpoints), kept, origin, host)
        self._relays[who] = {key: relay for key, relay in self._relays.get(who, {}).items() if key not in kept}
        for version, part in kept:  # it has what it pulled
            place = self._places.get((who, part))
            if place is not None and place.version == version:
                del self._places[who, part]
        self._suspect.pop(who, None)
        self._forget_old()

    def relay(
        self,
        who: Identity,
        endpoints: Mapping[str, str],
        version: Version,
        digest: str,
        part: int = 0,
        layout: str = "",
    ) -> None:
        """`who` pulls a part of `version` and gives on what it has got, until it announces it or gives it up.

        Raises FencedError for an older incarnation, WeightError for another digest than was announced.
        """
        self.check(who)
        key = version, part
        known = self._digests.get(key)
        if digest != known:
            self.refused[str(who)] += 1
            raise WeightError(
                f"another content was relayed for version {version}",
                who=who,
                why=f"its digest is {known}, not {digest}",
            )
        holder = self._holders.get(who)
        if holder is None or key not in holder.held:
            others = {key: relay for key, relay in self._relays.get(who, {}).items() if key[0] == version}
            self._relays[who] = {**others, key: _Relay(dict(endpoints), digest, layout)}

    def retire(self, who: Identity) -> None:
        """`who` serves and pulls no more."""
        self._holders.pop(who, None)
        self._relays.pop(who, None)
        self._suspect.pop(who, None)
        self._places = {key: place for key, place in self._places.items() if who not in (key[0], place.source)}
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
        self, puller: Identity, version: Version, now: float, part: int = 0, layout: str = "", host: str = ""
    ) -> Assignment | None:
        """A source of a part of `version` for `puller`, or None while every source is busy, avoided or gone.

        Sources that failed nobody come before those that did, those that hold all before those that are getting it,
        relays before the publisher, those whose memory can be mapped before others, idle before busy. The place is
        the puller's until it releases it, is given another one, or `lease_s` passed without `renew`.

        Args:
            host: where the puller can map the memory of holders; empty where it cannot.
        """
        self.check(puller)
        self._places.pop((puller, part), None)
        busy: dict[Identity, set[Identity]] = {}
        for (who, _), place in self._places.items():
            # A puller that failed those after it may be frozen in its place.
            if place.until > now and not place.mapped and who != puller and self._suspect.get(who, now) <= now:
                busy.setdefault(place.source, set()).add(who)
        best: tuple[tuple[object, ...], _Candidate] | None = None
        for found in self._candidates(puller, (version, part), now, layout, host):
            others = len(busy.get(found.source, ()))
            if self._failed.get((puller, found.source), now) > now:
                continue
            if others >= self.pullers_per_source and not found.mapped:
                continue
            suspect = self._suspect.get(found.source, now) > now
            rank = (suspect, found.depth, found.origin, not found.mapped, others, found.source)
            if best is None or rank < best[0]:
                best = rank, found
        if best is None:
            return None
        chosen = best[1]
        self._places[puller, part] = _Place(chosen.source, version, now + self.lease_s, chosen.mapped)
        return Assignment(chosen.source, dict(chosen.endpoints), version, chosen.digest, part, chosen.depth)

    def _candidates(self, puller: Identity, key: Key, now: float, layout: str, host: str) -> Iterator[_Candidate]:
        for source, holder in self._holders.items():
            offer = holder.held.get(key)
            if source != puller and offer is not None and offer.layout in ("", layout):
                mapped = host != "" and holder.host == host
                yield _Candidate(source, holder.endpoints, offer.digest, 0, holder.origin, mapped)
        for source, relays in self._relays.items():
            relay = relays.get(key)
            if source != puller and relay is not None and relay.layout in ("", layout):
                depth = self._depth(source, key, puller, now)
                if depth is not None and depth <= MAX_DEPTH:
                    yield _Candidate(source, relay.endpoints, relay.digest, depth, False, False)

    def _depth(self, who: Identity, key: Key, puller: Identity, now: float) -> int | None:
        """How many sources stand between `who` and one that holds all. None when it gets nothing at present, or what
        it gets comes from `puller`."""
        version, part = key
        depth = 0
        while True:
            place = self._places.get((who, part))
            if place is None or place.version != version or place.until <= now:
                return None
            depth += 1
            who = place.source
            if who == puller or depth > MAX_DEPTH:
                return None
            holder = self._holders.get(who)
            if holder is not None and key in holder.held:
                return depth

    def renew(self, puller: Identity, source: Identity, now: float, part: int = 0) -> bool:
        """`puller` is still at it. False when `source` must not be read any more: a newer incarnation took over."""
        self.check(puller)
        place = self._places.get((puller, part))
        if place is not None and place.source == source:
            place.until = now + self.lease_s
        return source.incarnation >= self._floor.get(source.member, 0)

    def release(
        self,
        puller: Identity,
        source: Identity,
        now: float,
        *,
        failed: bool = False,
        gone: bool = False,
        part: int = 0,
    ) -> None:
        """`puller` needs `source` no more.

        Args:
            failed: this puller avoids it for a while, and others do while they have a choice.
            gone: it was well and had nothing of what it was said to give on.
        """
        self.check(puller)
        place = self._places.get((puller, part))
        if place is not None and place.source == source:
            del self._places[puller, part]
            if gone:
                self._relays.get(source, {}).pop((place.version, part), None)
        if failed:
            self._failed = {pair: until for pair, until in self._failed.items() if until > now}
            self._failed[puller, source] = self._suspect[source] = now + self.avoid_s

    def places(self, member: Member) -> list[tuple[Identity, Identity]]:
        """(puller, source) for each place at a source that an incarnation of `member` has."""
        return sorted({(who, place.source) for (who, _), place in self._places.items() if who.member == member})

    def next_change(self, now: float) -> float | None:
        """When an assignment that is refused now may succeed although nobody says anything, or None."""
        times = [*self._failed.values(), *(place.until for place in self._places.values())]
        return min((time for time in times if time > now), default=None)

    # -----------------------------------------------------------------------------------------------------------

    def _known(self) -> set[Identity]:
        return {*self._holders, *self._relays, *(who for who, _ in self._places), *self._suspect}

    def _forget_old(self) -> None:
        if len(self._digests) <= REMEMBERED_VERSIONS:
            return
        held = {key for holder in self._holders.values() for key in holder.held}
        for key in sorted(self._digests)[:-REMEMBERED_VERSIONS]:
            if key not in held:
                del self._digests[key]
        known = {version for version, _ in self._digests}
        self._parts = {version: parts for version, parts in self._parts.items() if version in known}
