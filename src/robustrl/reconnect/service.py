"""The directory over the wire: the handler that its host serves, and the client of publishers and subscribers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec

from robustrl import events
from robustrl.errors import FencedError, ProtocolError, WeightError
from robustrl.events import Emit
from robustrl.reconnect.directory import Assignment, Directory, Offer, Text
from robustrl.roles import Identity, Member, Version
from robustrl.wire import Call

MAX_WAIT_S: Final = 60.0
PREFIX: Final = "weights."

Wait = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]


class _Announce(msgspec.Struct, forbid_unknown_fields=True):
    endpoints: Annotated[dict[Text, Text], msgspec.Meta(max_length=16)]
    held: Annotated[list[Offer], msgspec.Meta(max_length=4096)]
    origin: bool
    publish: Version | None = None
    host: Text = ""


class _Relay(msgspec.Struct, forbid_unknown_fields=True):
    endpoints: Annotated[dict[Text, Text], msgspec.Meta(max_length=16)]
    version: Version
    digest: Text
    part: int = 0
    layout: Text = ""


class _Newest(msgspec.Struct, forbid_unknown_fields=True):
    newer_than: Version | None = None
    step: int | None = None
    wait_s: Wait = 0.0
    layout: Text = ""


class _Assign(msgspec.Struct, forbid_unknown_fields=True):
    version: Version
    wait_s: Wait = 0.0
    part: int = 0
    layout: Text = ""
    host: Text = ""


class _Relays(msgspec.Struct, forbid_unknown_fields=True):
    version: Version
    count: Annotated[int, msgspec.Meta(ge=1)] = 1
    wait_s: Wait = 0.0


class _Renew(msgspec.Struct, forbid_unknown_fields=True):
    source: Identity
    part: int = 0


class _Release(msgspec.Struct, forbid_unknown_fields=True):
    source: Identity
    failed: bool = False
    gone: bool = False
    why: Text = ""
    part: int = 0


class _Retire(msgspec.Struct, forbid_unknown_fields=True):
    pass


P = TypeVar("P")


def _read(params: dict[str, Any], kind: type[P]) -> P:
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        raise ProtocolError("the parameters of a call about weights are wrong", why=str(error)) from error


class DirectoryService:
    """Answers the calls ``weights.*`` of members. Its host passes them on from its own server, on one loop.

    Args:
        directory: the state.
        emit: where refusals and failed sources are said.
        clock: seconds, monotonic.
    """

    def __init__(self, directory: Directory, emit: Emit, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.directory = directory
        self._emit = emit
        self._clock = clock
        self._changed = asyncio.Event()

    def fence(self, member: Member, incarnation: int) -> None:
        """See `Directory.fence`; wakes whoever waits for a place that becomes free."""
        for puller, source in self.directory.places(member):
            if puller.incarnation < incarnation:
                text = f"{puller} in phase sync was lost while it pulled from {source}"
                self._emit(events.Alarm(text=text, member=str(member)))
        self.directory.fence(member, incarnation)
        self._wake()

    async def handle(self, caller: Identity, method: str, params: dict[str, Any]) -> Any:
        """Answers one call. Raises FencedError, WeightError or ProtocolError, which travel to the caller."""
        try:
            self.directory.check(caller)
            return await self._dispatch(caller, method, params)
        except (FencedError, WeightError) as error:
            self._emit(events.Refused(what=method, identity=str(caller), why=str(error)))
            raise

    async def _dispatch(self, caller: Identity, method: str, params: dict[str, Any]) -> Any:
        match method.removeprefix(PREFIX):
            case "announce":
                said = _read(params, _Announce)
                self.directory.announce(
                    caller, said.endpoints, said.held, origin=said.origin, publish=said.publish, host=said.host
                )
                self._wake()
            case "relay":
                gives = _read(params, _Relay)
                self.directory.relay(caller, gives.endpoints, gives.version, gives.digest, gives.part, gives.layout)
                self._wake()
            case "newest":
                asked = _read(params, _Newest)
                return await self._wait(
                    lambda: self.directory.newest(asked.newer_than, asked.step, asked.layout), asked.wait_s
                )
            case "assign":
                wanted = _read(params, _Assign)
                return await self._wait(
                    lambda: self.directory.assign(
                        caller, wanted.version, self._clock(), wanted.part, wanted.layout, wanted.host
                    ),
                    wanted.wait_s,
                )
            case "relays":
                hoped = _read(params, _Relays)

                def enough() -> bool | None:
                    return self.directory.relays(hoped.version) >= hoped.count or None

                return bool(await self._wait(enough, hoped.wait_s))
            case "renew":
                at = _read(params, _Renew)
                return self.directory.renew(caller, at.source, self._clock(), at.part)
            case "release":
                done = _read(params, _Release)
                self.directory.release(
                    caller, done.source, self._clock(), failed=done.failed, gone=done.gone, part=done.part
                )
                if done.failed:
                    text = f"{caller} in phase sync gave up source {done.source} {done.why}"
                    self._emit(events.Alarm(text=text, member=str(done.source.member)))
                self._wake()
            case "retire":
                _read(params, _Retire)
                self.directory.retire(caller)
                self._wake()
            case _:
                raise ProtocolError(f"there is no call {method!r}")
        return None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, look: Callable[[], Offer | Assignment | bool | None], wait_s: float) -> Any:
        end = self._clock() + wait_s
        while True:
            changed = self._changed
            found = look()
            now = self._clock()
            if found is not None or now >= end:
                return msgspec.to_builtins(found)
            until = min(end, self.directory.next_change(now) or end)
            try:
                await asyncio.wait_for(changed.wait(), max(until - now, 0.001))
            except TimeoutError:
                continue


class DirectoryClient:
    """The directory as a member sees it.

    Args:
        call: reaches the directory's host (`RpcClient.call`), over its restarts.
        patience_s: seconds to wait for an answer beyond the wait that was asked for.
    """

    def __init__(self, call: Call, *, patience_s: float = 10.0) -> None:
        self._call = call
        self.patience_s = patience_s

    async def announce(
        self,
        endpoints: Mapping[str, str],
        held: Sequence[Offer],
        *,
        origin: bool,
        publish: Version | None = None,
        host: str = "",
    ) -> None:
        await self._call(
            "weights.announce",
            timeout=self.patience_s,
            endpoints=dict(endpoints),
            held=msgspec.to_builtins(held),
            origin=origin,
            publish=msgspec.to_builtins(publish),
            host=host,
        )

    async def relay(
        self, endpoints: Mapping[str, str], version: Version, digest: str, *, part: int = 0, layout: str = ""
    ) -> None:
        """Says that we give on what we have got of a part of `version`."""
        await self._call(
            "weights.relay",
            timeout=self.patience_s,
            endpoints=dict(endpoints),
            version=msgspec.to_builtins(version),
            digest=digest,
            part=part,
            layout=layout,
        )

    async def newest(
        self, newer_than: Version | None = None, step: int | None = None, *, wait_s: float = 0.0, layout: str = ""
    ) -> Offer | None:
        """The newest version that someone holds; waits up to `wait_s` for one that fits."""
        wait_s = min(wait_s, MAX_WAIT_S)
        answer = await self._call(
            "weights.newest",
            timeout=wait_s + self.patience_s,
            newer_than=msgspec.to_builtins(newer_than),
            step=step,
            wait_s=wait_s,
            layout=layout,
        )
        return None if answer is None else _answer(answer, Offer)

    async def assign(
        self, version: Version, *, wait_s: float = 0.0, part: int = 0, layout: str = "", host: str = ""
    ) -> Assignment | None:
        """A source of a part of `version`; waits up to `wait_s` for a free one."""
        wait_s = min(wait_s, MAX_WAIT_S)
        answer = await self._call(
            "weights.assign",
            timeout=wait_s + self.patience_s,
            version=msgspec.to_builtins(version),
            wait_s=wait_s,
            part=part,
            layout=layout,
            host=host,
        )
        return None if answer is None else _answer(answer, Assignment)

    async def relayed(self, version: Version, count: int, *, wait_s: float = 0.0) -> bool:
        """Whether `count` members that did not make `version` hold it; waits up to `wait_s` for them."""
        wait_s = min(wait_s, MAX_WAIT_S)
        return bool(
            await self._call(
                "weights.relays",
                timeout=wait_s + self.patience_s,
                version=msgspec.to_builtins(version),
                count=count,
                wait_s=wait_s,
            )
        )

    async def renew(self, source: Identity, part: int = 0) -> bool:
        """Says that we still pull from `source`. False when a newer incarnation took over from it."""
        return bool(
            await self._call("weights.renew", timeout=self.patience_s, source=msgspec.to_builtins(source), part=part)
        )

    async def release(
        self, source: Identity, *, failed: bool = False, gone: bool = False, why: str = "", part: int = 0
    ) -> None:
        await self._call(
            "weights.release",
            timeout=self.patience_s,
            source=msgspec.to_builtins(source),
            failed=failed,
            gone=gone,
            why=why[:1000],
            part=part,
        )

    async def retire(self) -> None:
        await self._call("weights.retire", timeout=self.patience_s)


def _answer(message: Any, kind: type[P]) -> P:
    try:
        return msgspec.convert(message, kind)
    except msgspec.ValidationError as error:
        raise ProtocolError("the directory's answer cannot be read", why=str(error)) from error
