"""The ways in which weights get from one trainer to n receivers: robustrl's transports and their alternatives.

A way is opened for a size and a number of receivers. Each `sync` changes the trainer's weights and brings them into
the live tensors of all receivers; it returns when each of them had them, counted from the trainer's start.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from _actors import PRIVATE, Actor, now
from _private_ray import LOOPBACK, PrivateRay
from _ray_member import RayMember

from robustrl.config import ReconnectConfig
from robustrl.events import ignore
from robustrl.reconnect import Directory, DirectoryClient, DirectoryService, WeightPublisher, WeightSubscriber
from robustrl.roles import Identity, Version
from robustrl.wire import Address, RpcClient, RpcServer, Secret, bind

SECRET = Secret(b"a secret for benchmarks on loopback")
TENSORS = 16
LIMIT_S = 120.0


def make_weights(size: int) -> dict[str, torch.Tensor]:
    """`size` bytes in tensors of the same size; no two chunks are alike."""
    count = size // TENSORS // 4
    return {
        f"layer.{index:02}": torch.arange(index * count, (index + 1) * count, dtype=torch.int32).view(torch.float32)
        for index in range(TENSORS)
    }


def change(weights: dict[str, torch.Tensor], step: int) -> None:
    """Something on every page: no chunk is as it was."""
    for tensor in weights.values():
        tensor[::1024] = float(step)


def check(weights: dict[str, torch.Tensor], step: int) -> None:
    for name, tensor in weights.items():
        if float(tensor[0]) != step or float(tensor[1024 * ((tensor.numel() - 1) // 1024)]) != step:
            raise AssertionError(f"{name} does not have the weights of step {step}")


def flat(weights: dict[str, torch.Tensor]) -> list[memoryview]:
    return [memoryview(tensor.numpy().data).cast("B") for tensor in weights.values()]


class Synced:
    """When each receiver had the weights, and for how long the trainer could not go on. Seconds from the start."""

    def __init__(self, began: float, free: float, done: list[float]) -> None:
        self.each = sorted(at - began for at in done)
        self.last = self.each[-1]
        self.trainer = free - began


class Rig(Protocol):
    def sync(self, step: int) -> Synced: ...

    def close(self) -> None: ...


def _sync(trainer: Actor, receivers: list[Actor], step: int) -> Synced:
    """Receivers wait already when the trainer begins, as followers do."""
    trainer.ask("prepare", step=step)
    for receiver in receivers:
        receiver.begin("receive", step=step)
    began, free = trainer.ask("give", step=step)
    return Synced(began, free, [receiver.end() for receiver in receivers])


class _Actors:
    """A trainer and receivers in processes of their own."""

    def __init__(self, trainer: Actor, receivers: list[Actor], others: list[Actor] | None = None) -> None:
        self.trainer = trainer
        self.receivers = receivers
        self.others = others or []

    def sync(self, step: int) -> Synced:
        return _sync(self.trainer, self.receivers, step)

    def close(self) -> None:
        for actor in (*self.receivers, self.trainer, *self.others):
            actor.close()


# -- robustrl -------------------------------------------------------------------------------------------------------


class DirectoryHost:
    async def start(self, host: str) -> tuple[str, int]:
        service = DirectoryService(Directory(), ignore)
        self.server = RpcServer(service.handle, SECRET, bind(host))
        await self.server.start()
        return self.server.address.host, self.server.address.port


class Member:
    """A publisher or a subscriber with live weights."""

    def __init__(self, who: str, size: int, transport: str, directory: tuple[str, int], host: str) -> None:
        identity = Identity.parse(who)
        client = DirectoryClient(RpcClient(lambda: Address(*directory), identity, SECRET).call)
        config = ReconnectConfig(transport=transport, keep_versions=1)  # type: ignore[arg-type]
        kind = WeightPublisher if identity.member.role == "trainer" else WeightSubscriber
        self.weights: Any = kind(identity, client, config, SECRET, ignore, host=host)
        self.live = make_weights(size)

    async def start(self) -> None:
        await self.weights.start()

    def prepare(self, step: int) -> None:
        change(self.live, step)

    async def give(self, step: int) -> tuple[float, float]:
        began = now()
        await self.weights.publish(self.live, Version(1, step))
        return began, now()

    async def receive(self, step: int) -> float:
        held = await self.weights.pull(Version(1, step - 1), timeout=100.0)
        self.weights.apply(held, self.live)
        done = now()
        check(self.live, step)
        return done

    async def join(self, step: int) -> tuple[float, float]:
        """(seconds for pull and load of what is there already, bytes of it)."""
        began = now()
        held = await self.weights.pull(timeout=100.0)
        self.weights.apply(held, self.live)
        done = now()
        check(self.live, step)
        return done - began, held.bytes

    def served(self) -> int:
        return int(self.weights.served_bytes)


class RobustRig(_Actors):
    """`places` are (namespace, address) of the directory, the trainer and the receivers, in this order."""

    def __init__(self, transport: str, size: int, receivers: int, places: list[tuple[str, str]] | None = None) -> None:
        self.transport = transport
        self.size = size
        self._places = places or [("", LOOPBACK)] * (receivers + 2)
        namespace, host = self._places[0]
        directory = Actor(DirectoryHost, namespace=namespace)
        self._directory = directory.ask("start", host=host)
        super().__init__(self.member("trainer/0#1", 1), [], [directory])
        self.receivers += [self.member(f"rollout/{index}#1", index + 2) for index in range(receivers)]

    def member(self, who: str, place: int) -> Actor:
        namespace, host = self._places[place]
        actor = Actor(Member, who, self.size, self.transport, self._directory, host, namespace=namespace)
        actor.ask("start")
        return actor


# -- alternatives ---------------------------------------------------------------------------------------------------


class GlooMember:
    def __init__(self, rank: int, world: int, size: int, port: int) -> None:
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"tcp://{LOOPBACK}:{port}", rank=rank, world_size=world)
        self.dist = dist
        self.live = make_weights(size)

    def start(self) -> None:
        self.dist.barrier()

    def prepare(self, step: int) -> None:
        change(self.live, step)

    def give(self, step: int) -> tuple[float, float]:
        began = now()
        for tensor in self.live.values():
            self.dist.broadcast(tensor, src=0)
        return began, now()

    def receive(self, step: int) -> float:
        for tensor in self.live.values():
            self.dist.broadcast(tensor, src=0)
        done = now()
        check(self.live, step)
        return done


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        return int(sock.getsockname()[1])


class GlooRig(_Actors):
    def __init__(self, size: int, receivers: int) -> None:
        port = free_port()
        members = [Actor(GlooMember, rank, receivers + 1, size, port) for rank in range(receivers + 1)]
        for member in members:
            member.begin("start")
        for member in members:
            member.end()
        super().__init__(members[0], members[1:])


class RawMember:
    """Blocking sockets and nothing else: one connection and one thread a receiver at the trainer."""

    def __init__(self, size: int) -> None:
        self.live = make_weights(size)
        self.views = flat(self.live)
        self.sockets: list[socket.socket] = []

    def listen(self, host: str) -> int:
        self.listener = socket.create_server((host, 0), backlog=64)
        return int(self.listener.getsockname()[1])

    def accept(self, count: int) -> None:
        for _ in range(count):
            sock, _ = self.listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sockets.append(sock)

    def connect(self, host: str, port: int) -> None:
        self.sockets.append(socket.create_connection((host, port)))

    def prepare(self, step: int) -> None:
        change(self.live, step)

    def give(self, step: int) -> tuple[float, float]:
        began = now()
        threads = [threading.Thread(target=self._send, args=(sock,)) for sock in self.sockets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return began, now()

    def _send(self, sock: socket.socket) -> None:
        for view in self.views:
            sock.sendall(view)

    def receive(self, step: int) -> float:
        [sock] = self.sockets
        for view in self.views:
            got = 0
            while got < len(view):
                count = sock.recv_into(view[got:])
                if not count:
                    raise EOFError("the sender ended")
                got += count
        done = now()
        check(self.live, step)
        return done


class RawRig(_Actors):
    def __init__(self, size: int, receivers: int, places: list[tuple[str, str]] | None = None) -> None:
        places = (places or [("", LOOPBACK)] * (receivers + 2))[1 : receivers + 2]
        members = [Actor(RawMember, size, namespace=namespace) for namespace, _ in places]
        super().__init__(members[0], members[1:])
        host = places[0][1]
        port = self.trainer.ask("listen", host=host)
        self.trainer.begin("accept", count=receivers)
        for receiver in self.receivers:
            receiver.ask("connect", host=host, port=port)
        self.trainer.end()


class CopyMember:
    def __init__(self, size: int) -> None:
        self.live = make_weights(size)
        self.frozen = make_weights(size)
        self.loaded = make_weights(size)

    def sync(self, step: int) -> tuple[float, float, float]:
        change(self.live, step)
        began = now()
        for name, tensor in self.live.items():
            self.frozen[name].copy_(tensor)
        free = now()
        for name, tensor in self.frozen.items():
            self.loaded[name].copy_(tensor)
        done = now()
        check(self.loaded, step)
        return began, free, done


class CopyRig:
    """The two copies that freezing and loading cost at the least, in one process, between warm buffers."""

    def __init__(self, size: int) -> None:
        self.actor = Actor(CopyMember, size)

    def sync(self, step: int) -> Synced:
        began, free, done = self.actor.ask("sync", step=step)
        return Synced(began, free, [done])

    def close(self) -> None:
        self.actor.close()


# -- Ray ------------------------------------------------------------------------------------------------------------


class RayDriver(PrivateRay):
    """The trainer and the receivers, as actors."""

    def begin(self, **arguments: Any) -> None:
        kind = self.ray.remote(num_cpus=0)(RayMember)
        self.members = [kind.remote() for _ in range(arguments["members"])]
        self.allocate(1 << 20, arguments["members"])

    def allocate(self, size: int, members: int) -> None:
        """The first `members` actors get live weights of `size` bytes."""
        self.ray.get([member.allocate.remote(size) for member in self.members[:members]], timeout=LIMIT_S)

    def sync(self, step: int, receivers: int) -> tuple[float, float, list[float]]:
        trainer, *others = self.members[: receivers + 1]
        self.ray.get(trainer.prepare.remote(step), timeout=LIMIT_S)
        began, refs, free = self.ray.get(trainer.give.remote(), timeout=LIMIT_S)
        done = self.ray.get([other.receive.remote(refs, step) for other in others], timeout=LIMIT_S)
        return began, free, done


class RayCluster:
    """Ray in a network namespace and a folder of its own. Its actors stay for the run, their weights for a visit."""

    def __init__(self, store_bytes: int, members: int) -> None:
        self.driver = Actor(RayDriver, namespace=PRIVATE)
        self.driver.ask("start", store_bytes=store_bytes, members=members)

    @contextlib.contextmanager
    def rig(self, size: int, receivers: int) -> Iterator[Rig]:
        self.driver.ask("allocate", size=size, members=receivers + 1)
        try:
            yield RayRig(self.driver, receivers)
        finally:
            self.driver.ask("allocate", size=0, members=receivers + 1)

    def close(self) -> None:
        try:
            self.driver.ask("stop")
        finally:
            self.driver.close()


class RayRig:
    def __init__(self, driver: Actor, receivers: int) -> None:
        self.driver = driver
        self.receivers = receivers

    def sync(self, step: int) -> Synced:
        return Synced(*self.driver.ask("sync", step=step, receivers=self.receivers))

    def close(self) -> None:
        """The driver and its actors stay."""
