"""A source lends its memory to a puller that has half of the version staged already."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from robustrl.config import ReconnectConfig
from robustrl.errors import CorruptChunkError
from robustrl.events import ignore
from robustrl.reconnect import DirectoryClient, WeightSubscriber, subscriber
from robustrl.reconnect.content import freeze
from robustrl.reconnect.directory import Assignment
from robustrl.reconnect.memory import Pool
from robustrl.reconnect.partial import Partial
from robustrl.roles import Identity, Version
from robustrl.wire import Secret


class Lent:
    def __init__(self, content: Any, spoiled: int) -> None:
        self.size = content.size
        self.view = memoryview(bytearray(content.buffer.view))
        self.view[spoiled] ^= 1
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_what_is_verified_in_lent_memory_is_not_given_on_from_the_staging_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscriber, "RANGE_BYTES", 64)

    async def nowhere(method: str, /, *, timeout: float | None = None, **params: Any) -> Any:
        raise AssertionError("nobody is called")

    async def main() -> None:
        who, source = Identity.parse("rollout/0#1"), Identity.parse("trainer/0#1")
        puller = WeightSubscriber(
            who, DirectoryClient(nowhere), ReconnectConfig(transport="tcp"), Secret(bytes(32)), ignore
        )
        content = freeze({"a": torch.arange(4096, dtype=torch.int32)}, 64)
        partial = Partial(content.digest, None, Pool())
        partial.describe(content.encoded)
        staged = await partial.stage([])
        missing = list(partial.missing)
        lent = Lent(content, spoiled=content.size - 1)
        assignment = Assignment(source, {}, Version(1, 1), content.digest)
        with pytest.raises(CorruptChunkError):
            await puller._check_lent(assignment, partial, lent, "shm")  # type: ignore[arg-type]
        assert lent.closed
        assert staged.arrival is not None
        assert staged.arrival.upto == 0
        assert list(partial.missing) == missing

    asyncio.run(main())
