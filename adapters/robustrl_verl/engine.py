"""The checkpoint engine ``robustrl``: weights over reconnect's channel, through verl's own registry.

    actor_rollout_ref.rollout.checkpoint_engine.backend=robustrl
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=robustrl_verl.engine

The trainer's master rank publishes a version and is done; each rollout worker pulls it by itself, whole or not at all.
There is no process group to build or to break. Nothing else of this adapter is needed for it, but without it verl still
waits for all receivers together.

A version is (the trainer worker's life, global_steps), so that what a trainer that was rebuilt publishes is above all
that its predecessor did.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from robustrl.errors import DeadlineError
from robustrl.reconnect import DirectoryClient, HeldVersion
from robustrl.reconnect.blocking import Channel, Publisher, Subscriber
from robustrl.roles import ROLLOUT, TRAINER, Identity, Member, Version
from robustrl.wire import RpcClient, Secret
from robustrl_verl.hub import (
    await_hub,
    call_hub_now,
    emitter,
    find_hub,
    listen_host,
    locate,
    rollout_member,
    session_config,
    start_hub,
)

if TYPE_CHECKING:
    import torch

WAIT_S: Final = 120.0
STRANGERS: Final = 1 << 16
"""Where indices of receivers begin that do not say which replica they belong to."""
_PREFIX: Final = re.compile(r"rollout_standalone_(\d+)")


class Link:
    """A process's place in the weight channel: its identity, and its connection to the directory.

    Args:
        member: who it is.
        hub: the job's. Where the engine is used alone, the trainer has started it, and it lives while it is held here.
    """

    def __init__(self, member: Member, hub: Any) -> None:
        self._hub = hub
        _, secret = call_hub_now("contact")
        self.identity = Identity(member, call_hub_now("begin", member.role, member.index))
        self.secret = Secret(bytes.fromhex(secret))
        self.emit = emitter(self.identity)
        self.channel = Channel()
        self.client = RpcClient(
            locate(find_hub), self.identity, self.secret, on_connect=self._connected, server="the weight directory"
        )
        self.directory = DirectoryClient(self.client.call)
        self.end: Publisher | Subscriber | None = None

    def arguments(self, config: Any) -> tuple[Any, ...]:
        return (self.identity, self.directory, config, self.secret, self.emit)

    def _connected(self) -> None:
        # A directory that was restarted is empty. The loop that calls this must not wait for itself.
        if self.end is not None:
            threading.Thread(target=self._say_again, daemon=True).start()

    def _say_again(self) -> None:
        member = self.identity.member
        call_hub_now("resume", member.role, member.index, self.identity.incarnation)
        assert self.end is not None
        self.end.reannounce()


@CheckpointEngineRegistry.register("robustrl")
class RobustCheckpointEngine(CheckpointEngine):
    """See the module.

    Args:
        bucket_size: verl's; the channel has chunks of its own.
        is_master: whether this trainer rank publishes; verl gives it on the trainer's side only.
        wait_s: seconds that a receiver waits for a version, and a publication may take.
        transport, ...: settings of `ReconnectConfig`, as ``checkpoint_engine.engine_kwargs.robustrl`` names them.
    """

    def __init__(
        self, bucket_size: int, is_master: bool | None = None, wait_s: float = WAIT_S, **settings: Any
    ) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.wait_s = wait_s
        config = msgspec.structs.asdict(session_config().reconnect) | settings
        self._config = msgspec.convert(config, type(session_config().reconnect))
        self._link: Link | None = None
        self._publications = 0

    # -- verl's steps around a transfer: there is nothing to build and nothing to take down -------------------------

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        pass

    def finalize(self) -> None:
        pass

    # -- the trainer ------------------------------------------------------------------------------------------------

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publishes the tensors as one version. Returns once it can be pulled; the trainer may go on training.

        Every rank runs through the generator: gathering a sharded tensor is a collective.
        """
        if not self.is_master:
            async for _ in ensure_async_iterator(weights):
                pass
            return {}
        # On the host one by one: a whole model's copy must not stand on the device.
        tensors = {name: tensor.detach().cpu() async for name, tensor in ensure_async_iterator(weights)}
        began = time.monotonic()
        size = await asyncio.to_thread(self._publish, tensors, global_steps)
        return {"robustrl/publish_s": time.monotonic() - began, "robustrl/bytes": float(size)}

    def _publish(self, tensors: Mapping[str, torch.Tensor], global_steps: int | None) -> int:
        if self._link is None:
            link = Link(Member(TRAINER), start_hub())
            link.end = link.channel.publisher(*link.arguments(self._config), host=listen_host())
            self._link = link
        assert isinstance(self._link.end, Publisher)
        self._publications += 1
        step = self._publications if global_steps is None else global_steps
        version = Version(self._link.identity.incarnation, step)
        return self._link.end.publish(tensors, version, timeout=self.wait_s).bytes

    # -- a replica's worker -----------------------------------------------------------------------------------------

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of the version of `global_steps`, once all of it is here and verified.

        Raises DeadlineError when nobody has it for `wait_s` seconds; nothing was yielded then.
        """
        tensors = await asyncio.to_thread(self._pull, global_steps)
        for name in list(tensors):
            yield name, tensors.pop(name)

    def _pull(self, global_steps: int | None) -> dict[str, torch.Tensor]:
        if self._link is None:
            link = Link(own_member(), await_hub(self.wait_s))
            link.end = link.channel.subscriber(*link.arguments(self._config), host=listen_host())
            self._link = link
        assert isinstance(self._link.end, Subscriber)
        held = self._link.end.pull(step=global_steps, timeout=self.wait_s)
        if held is None:
            raise DeadlineError(
                f"no version of step {global_steps} within {self.wait_s:g} s",
                who=self._link.identity,
                phase="sync",
                why="nobody that holds it can be reached",
            )
        tensors = blank(held)
        self._link.end.apply(held, tensors)
        return tensors


def blank(held: HeldVersion) -> dict[str, torch.Tensor]:
    """Tensors that a version can be loaded into: its names, shapes and dtypes."""
    import torch

    specs = [spec for content in held.contents for spec in content.manifest.tensors]
    return {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs}


def own_member() -> Member:
    """Which replica's worker this process is: verl's worker groups carry the replica's rank in their name."""
    found = _PREFIX.match(os.environ.get("WG_PREFIX", ""))
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if found is not None:
        return rollout_member(int(found[1]), rank, world)
    return Member(ROLLOUT, STRANGERS + os.getpid() % STRANGERS)
