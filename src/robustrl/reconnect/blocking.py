"""The weight channel for code without an event loop: the same calls, each waiting for its end.

One thread runs the loop, so that versions are served between the calls:

    with blocking.Channel() as channel:
        publisher = channel.publisher(identity, directory, config, secret, emit)
        publisher.publish(model.state_dict(), version)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from robustrl.errors import DeadlineError
from robustrl.reconnect.memory import MemoryReport
from robustrl.reconnect.publisher import Published, WeightPublisher
from robustrl.reconnect.sharding import Slice
from robustrl.reconnect.subscriber import HeldVersion, WeightSubscriber
from robustrl.roles import Version

if TYPE_CHECKING:
    import torch

CALL_S: Final = 120.0
"""Seconds for a call whose own limit is not given."""
GRACE_S: Final = 15.0
"""Seconds beyond a call's own limit before the loop itself counts as stuck."""

T = TypeVar("T")


class Channel:
    """The thread and its loop. `close`, or the end of the ``with``, closes whatever was made with it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="robustrl-weights", daemon=True)
        self._thread.start()
        self._made: list[WeightPublisher | WeightSubscriber] = []

    def run(self, work: Coroutine[Any, Any, T], timeout: float = CALL_S) -> T:
        """Runs a coroutine on the loop (that of a `DirectoryClient`'s connection, for example) and returns its value.

        Raises DeadlineError after `timeout` seconds; the coroutine is cancelled then.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():  # the work's own TimeoutError
                raise
            future.cancel()
            raise DeadlineError(f"the weight channel gave no answer within {timeout:g} s") from None

    def publisher(self, *args: Any, **options: Any) -> Publisher:
        """Makes and starts a publisher. Takes what `WeightPublisher` takes."""
        made = self.run(_made(WeightPublisher, args, options))
        self._made.append(made)
        return Publisher(self, made)

    def subscriber(self, *args: Any, **options: Any) -> Subscriber:
        """Makes and starts a subscriber. Takes what `WeightSubscriber` takes."""
        made = self.run(_made(WeightSubscriber, args, options))
        self._made.append(made)
        return Subscriber(self, made)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        try:
            for made in self._made:
                self.run(made.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(GRACE_S)
            if not self._thread.is_alive():
                self._loop.run_until_complete(self._loop.shutdown_default_executor())
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


M = TypeVar("M", WeightPublisher, WeightSubscriber)


async def _made(kind: type[M], args: tuple[Any, ...], options: dict[str, Any]) -> M:
    made = kind(*args, **options)
    await made.start()
    return made


class Publisher:
    """See `WeightPublisher`."""

    def __init__(self, channel: Channel, publisher: WeightPublisher) -> None:
        self._channel = channel
        self._publisher = publisher

    def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: Version,
        *,
        slices: Mapping[str, Slice] | None = None,
        part: int = 0,
        parts: int = 1,
        timeout: float = CALL_S,
    ) -> Published:
        work = self._publisher.publish(tensors, version, slices=slices, part=part, parts=parts)
        return self._channel.run(work, timeout)

    def released(self, version: Version, relays: int = 1, timeout: float = 30.0) -> bool:
        return self._channel.run(self._publisher.released(version, relays, timeout), timeout + GRACE_S)

    def drop(self, version: Version) -> None:
        self._channel.run(self._publisher.drop(version))

    def held(self) -> list[Version]:
        return self._publisher.held()

    def memory_report(self) -> MemoryReport:
        return self._publisher.memory_report()

    def reannounce(self) -> None:
        self._channel.run(self._publisher.reannounce())


class Subscriber:
    """See `WeightSubscriber`."""

    def __init__(self, channel: Channel, subscriber: WeightSubscriber) -> None:
        self._channel = channel
        self._subscriber = subscriber

    def pull(
        self, newer_than: Version | None = None, step: int | None = None, timeout: float = 30.0
    ) -> HeldVersion | None:
        return self._channel.run(self._subscriber.pull(newer_than, step, timeout), timeout + GRACE_S)

    def apply(self, held: HeldVersion, target: Mapping[str, torch.Tensor]) -> str:
        return self._subscriber.apply(held, target)

    @property
    def applied(self) -> HeldVersion | None:
        return self._subscriber.applied

    def held(self) -> list[Version]:
        return self._subscriber.held()

    def memory_report(self) -> MemoryReport:
        return self._subscriber.memory_report()

    def reannounce(self) -> None:
        self._channel.run(self._subscriber.reannounce())
