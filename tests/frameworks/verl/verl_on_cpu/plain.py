"""The checkpoint engine ``plain``, for stock runs: the trainer's first rank sends all weights to each receiver by TCP.

It does what verl asks of an engine and nothing about failures: a receiver that is gone ends the synchronisation.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any, Final

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

LIMIT_S: Final = 60.0
_LENGTH: Final = struct.Struct("!Q")


@CheckpointEngineRegistry.register("plain")
class PlainEngine(CheckpointEngine):
    """One header of names, dtypes and shapes, then the tensors' bytes in that order."""

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any) -> None:
        self.is_master = is_master
        self.listener: socket.socket | None = None
        self.source: tuple[str, int] | None = None
        self.receivers = 0

    def prepare(self) -> dict[str, Any]:
        if not self.is_master:
            return {}
        self.listener = socket.create_server(("127.0.0.1", 0))
        return {"source": self.listener.getsockname()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        facts = {"source": metadata[0]["source"], "receivers": rollout_world_size}
        return tuple(
            {key: [value] * n for key, value in facts.items()} for n in (actor_wg_world_size, rollout_world_size)
        )

    def init_process_group(self, source: tuple[str, int], receivers: int) -> None:
        self.source, self.receivers = source, receivers

    def finalize(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        # Every rank takes part in gathering each parameter, whoever sends it.
        tensors = [(name, tensor.detach().cpu().contiguous()) async for name, tensor in ensure_async_iterator(weights)]
        if self.listener is None:
            return {}
        header = json.dumps(
            [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors]
        ).encode()
        message = [_LENGTH.pack(len(header)), header, *(t.view(-1).view(torch.uint8).numpy().data for _, t in tensors)]
        loop = asyncio.get_running_loop()
        self.listener.setblocking(False)
        for _ in range(self.receivers):
            connection, _ = await asyncio.wait_for(loop.sock_accept(self.listener), LIMIT_S)
            with connection:
                for part in message:
                    await asyncio.wait_for(loop.sock_sendall(connection, part), LIMIT_S)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        assert self.source is not None
        reader, writer = await asyncio.open_connection(*self.source)
        try:
            (length,) = _LENGTH.unpack(await asyncio.wait_for(reader.readexactly(_LENGTH.size), LIMIT_S))
            for name, kind, shape in json.loads(await asyncio.wait_for(reader.readexactly(length), LIMIT_S)):
                tensor = torch.empty(shape, dtype=getattr(torch, kind))
                payload = await asyncio.wait_for(reader.readexactly(tensor.nbytes), LIMIT_S)
                tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
                yield name, tensor
        finally:
            writer.close()
