"""Sources that are too slow, too old, or not what the directory thinks."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from typing import Any

import msgspec
import pytest
import torch
from weights_rig import SECRET, Driven, Rig

from robustrl import events
from robustrl.config import ReconnectConfig
from robustrl.reconnect import Directory, DirectoryClient, DirectoryService, WeightPublisher, WeightSubscriber
from robustrl.roles import Identity, Version
from robustrl.wire import Secret

NEEDS_UCX = pytest.mark.skipif(not importlib.util.find_spec("ucxx"), reason="needs ucxx")


class Trickling(Driven):
    async def trickle(self) -> None:
        """From now on bytes leave drop by drop."""
        from robustrl.reconnect.transports.base import SocketStream

        async def drops(stream: SocketStream, view: memoryview) -> None:
            for at in range(0, len(view), 256):
                await asyncio.get_running_loop().sock_sendall(stream.sock, view[at : at + 256])
                await asyncio.sleep(0.05)

        SocketStream.send_bytes = drops  # type: ignore[method-assign]
        if importlib.util.find_spec("ucxx"):
            from robustrl.reconnect.transports import ucx

            put = ucx._Conversation._put

            async def late(conversation: Any, message: Any) -> None:
                await asyncio.sleep(0.8)
                await put(conversation, message)

            ucx._Conversation._put = late  # type: ignore[method-assign]


@pytest.mark.parametrize("transport", ["tcp", pytest.param("ucx", marks=NEEDS_UCX)])
def test_a_source_that_only_trickles_is_left_after_one_deadline(transport: str) -> None:
    rig = Rig(ReconnectConfig(transport=transport, timeout_s=0.5))  # type: ignore[arg-type]
    try:
        trainer, relay = rig.member("trainer/0#1"), rig.member("rollout/0#1", kind=Trickling)
        digest, _ = trainer.ask("publish", version="1.1", seed=1)
        relay.ask("pull")
        relay.ask("trickle")
        late = rig.member("rollout/1#1")
        began = time.monotonic()
        assert late.ask("pull") == ("1.1", digest)
        assert time.monotonic() - began < 4
        assert late.ask("stats")["sources"] == [["trainer/0#1"]]
        assert any("gave up source rollout/0#1" in getattr(event, "text", "") for event in rig.events)
    finally:
        rig.close()


def test_a_source_that_was_replaced_is_refused_by_the_puller_and_counted() -> None:
    """The directory is wrong or late; the puller has met the newer incarnation and knows better."""
    said: list[Any] = []
    lie = False

    async def main() -> None:
        nonlocal lie
        directory = DirectoryService(Directory(avoid_s=0.05), said.append)
        config, secret = ReconnectConfig(transport="tcp", timeout_s=1.0), Secret(SECRET)

        def client(who: Identity) -> DirectoryClient:
            async def call(method: str, /, *, timeout: float | None = None, **params: Any) -> Any:
                answer = await directory.handle(who, method, params)
                if lie and method == "weights.assign" and answer is not None:
                    answer["source"] = msgspec.to_builtins(Identity.parse("trainer/0#1"))
                return answer

            return DirectoryClient(call)

        trainer, rollout = Identity.parse("trainer/0#2"), Identity.parse("rollout/0#1")
        publisher = WeightPublisher(trainer, client(trainer), config, secret, said.append)
        subscriber = WeightSubscriber(rollout, client(rollout), config, secret, said.append)
        await publisher.start()
        await subscriber.start()
        try:
            await publisher.publish({"a": torch.ones(8)}, Version(2, 1))
            assert await subscriber.pull(timeout=5)
            await publisher.publish({"a": torch.zeros(8)}, Version(2, 2))
            lie = True
            assert await subscriber.pull(Version(2, 1), timeout=0.3) is None
            assert subscriber.refused_sources >= 1
            refused = [event for event in said if isinstance(event, events.Refused)]
            assert refused[0].identity == "trainer/0#1"
            assert "incarnation 2 has taken over" in refused[0].why
            assert subscriber.held() == [Version(2, 1)]
            lie = False
            held = await subscriber.pull(Version(2, 1), timeout=5)
            assert held is not None
            assert held.version == Version(2, 2)
        finally:
            await subscriber.close()
            await publisher.close()

    asyncio.run(main())
