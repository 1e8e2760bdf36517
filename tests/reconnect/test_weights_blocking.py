"""The channel for code without an event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from weights_rig import SECRET

from robustrl.config import ReconnectConfig
from robustrl.errors import DeadlineError, WeightError
from robustrl.events import ignore
from robustrl.reconnect import Directory, DirectoryClient, DirectoryService
from robustrl.reconnect.blocking import Channel
from robustrl.roles import Identity, Version
from robustrl.wire import Secret


def test_code_without_a_loop_publishes_pulls_and_applies() -> None:
    threads = threading.active_count()
    service = DirectoryService(Directory(), ignore)

    def with_who(name: str) -> tuple[Any, ...]:
        who = Identity.parse(name)

        async def call(method: str, /, *, timeout: float | None = None, **params: Any) -> Any:
            return await service.handle(who, method, params)

        return who, DirectoryClient(call), ReconnectConfig(transport="tcp"), Secret(SECRET), ignore

    with Channel() as channel:
        publisher, subscriber = channel.publisher(*with_who("trainer/0#1")), channel.subscriber(*with_who("r/0#1"))
        weights = {"a": torch.arange(1000.0)}
        done = publisher.publish(weights, Version(1, 1))
        weights["a"].zero_()
        held = subscriber.pull(timeout=10)
        assert held is not None
        target = {"a": torch.zeros(1000)}
        assert subscriber.apply(held, target) == done.digest
        assert torch.equal(target["a"], torch.arange(1000.0))
        assert subscriber.applied is held
        assert publisher.released(Version(1, 1), timeout=5)
        publisher.drop(Version(1, 1))
        assert (publisher.held(), subscriber.held()) == ([], [Version(1, 1)])
        assert subscriber.pull(Version(1, 1), timeout=0.1) is None
        assert subscriber.memory_report().held == 4000
        with pytest.raises(WeightError, match="not above"):
            publisher.publish(weights, Version(0, 1))
        with pytest.raises(DeadlineError, match=r"0\.1 s"):
            channel.run(asyncio.sleep(10), 0.1)
    assert threading.active_count() == threads
