"""Real processes around a directory: what the tests of the weight channel are made with.

Members are forked from a server that has already imported torch, so that a test costs forks and not imports.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from robustrl.config import ReconnectConfig
from robustrl.reconnect import Directory, DirectoryClient, DirectoryService, WeightPublisher, WeightSubscriber
from robustrl.reconnect.content import Content
from robustrl.reconnect.memory import Buffer, DeviceBuffer
from robustrl.roles import Identity, Version
from robustrl.wire import Address, RpcClient, RpcServer, Secret, bind

SECRET = b"a secret for the tests of weights"
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "robustrl.reconnect"])


def make_tensors(seed: int, mib: float = 1.0) -> dict[str, torch.Tensor]:
    """A small model with every oddity: dtypes, an empty tensor, a scalar, a transposed view, tied weights."""
    generator = torch.Generator().manual_seed(seed)
    big = torch.randn(int(mib * (1 << 18)), generator=generator)
    return {
        "big": big,
        "bf16": torch.randn(333, 7, generator=generator).to(torch.bfloat16),
        "fp16": torch.randn(1001, generator=generator).to(torch.float16),
        "fp8.e4m3": torch.randn(4097, generator=generator).to(torch.float8_e4m3fn),
        "fp8.e5m2": torch.randn(65, generator=generator).to(torch.float8_e5m2),
        "int8": torch.randint(-128, 127, (513,), dtype=torch.int8, generator=generator),
        "uint8": torch.randint(0, 255, (77,), dtype=torch.uint8, generator=generator),
        "flags": torch.randint(0, 2, (31,), generator=generator).bool(),
        "step": torch.tensor(seed),
        "empty": torch.empty(0, 5),
        "turned": torch.randn(40, 30, generator=generator).t(),
        "tied.a": big[:1000],
        "tied.b": big[:1000],
    }


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """A hash of each tensor's bytes that knows nothing of robustrl."""
    return {
        name: hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def blank(seed: int, mib: float) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in make_tensors(seed, mib).items()}


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class Driven:
    """Runs in the child: one publisher or subscriber, driven by commands."""

    def __init__(self, who: str, address: Address, config: ReconnectConfig, secret: bytes) -> None:
        self.identity = Identity.parse(who)
        self.events: list[Any] = []
        key = Secret(secret)
        self.client = RpcClient(lambda: address, self.identity, key, patience_s=20.0)
        directory = DirectoryClient(self.client.call)
        kind = WeightPublisher if self.identity.member.role == "trainer" else WeightSubscriber
        self.weights: Any = kind(self.identity, directory, config, key, self.events.append, **self.options())
        self.held: Any = None
        self.landed = FORKS.Value("q", 0)
        self.gate = FORKS.Event()

    def options(self) -> dict[str, Any]:
        """More arguments for the publisher or subscriber."""
        return {}

    async def publish(self, version: str, seed: int, mib: float = 1.0, mutate: bool = False) -> Any:
        tensors = make_tensors(seed, mib)
        done = await self.weights.publish(tensors, Version.parse(version))
        if mutate:
            for tensor in tensors.values():
                tensor.zero_()
        return done.digest, done.bytes

    async def pull(self, timeout: float = 20.0, newer_than: str | None = None, step: int | None = None) -> Any:
        newer = None if newer_than is None else Version.parse(newer_than)
        self.held = await self.weights.pull(newer, step, timeout=timeout)
        return None if self.held is None else (str(self.held.version), self.held.digest)

    async def apply(self, seed: int, mib: float = 1.0, change: str = "") -> Any:
        target = blank(seed, mib)
        if change == "shape":
            target["bf16"] = torch.zeros(7, 333, dtype=torch.bfloat16)
        elif change == "dtype":
            target["int8"] = target["int8"].to(torch.uint8)
        elif change == "name":
            del target["fp16"]
        before = fingerprint(target)
        try:
            digest = self.weights.apply(self.held, target)
        finally:
            changed = fingerprint(target) != before
        return digest, fingerprint(target), changed

    async def slow(self, pause_s: float) -> None:
        """From now on the puller takes its time with each range, and ranges are small."""
        from robustrl.reconnect import subscriber

        subscriber.RANGE_BYTES = 256 << 10
        check = subscriber._verify_all

        def slowly(*args: Any) -> None:
            check(*args)
            self.landed.value += 1
            time.sleep(pause_s)

        subscriber._verify_all = slowly

    async def hold(self) -> None:
        """From now on the puller verifies two ranges of 256 KiB, and no more until its gate is opened."""
        from robustrl.reconnect import subscriber

        subscriber.RANGE_BYTES = 256 << 10
        check = subscriber._verify_all

        def held(*args: Any) -> None:
            if self.landed.value >= 2:
                assert self.gate.wait(60)
            check(*args)
            self.landed.value += 1

        subscriber._verify_all = held

    async def spoil(self) -> None:
        """Flips a byte in the middle of everything that is held."""
        contents = self.weights._holder.contents
        for key, content in contents.items():
            if isinstance(content.buffer, DeviceBuffer):
                content.buffer.view[content.size // 2] ^= 1
                continue
            buffer = Buffer(content.size)
            buffer.view[:] = content.buffer.view  # which may be another's, and read-only
            buffer.view[content.size // 2] ^= 1
            contents[key] = Content(content.manifest, buffer)

    async def stats(self) -> dict[str, Any]:
        return {
            "served": self.weights.served_bytes,
            "pulled": getattr(self.weights, "pulled_bytes", 0),
            "corrupt": getattr(self.weights, "corrupt_chunks", 0),
            "held": [str(version) for version in self.weights.held()],
            "events": [type(event).__name__ for event in self.events],
            "transports": sorted({event.transport for event in self.events if hasattr(event, "transport")} - {""}),
            "sources": [list(event.sources) for event in self.events if hasattr(event, "sources")],
            "descriptors": descriptors(),
        }

    async def reannounce(self) -> None:
        await self.weights.reannounce()

    async def close(self) -> None:
        await self.weights.close()
        await self.client.close()


def _child(
    kind: type[Driven],
    who: str,
    address: Address,
    config: ReconnectConfig,
    secret: bytes,
    pipe: Any,
    landed: Any,
    gate: Any,
) -> None:
    torch.set_num_threads(1)

    async def main() -> None:
        member = kind(who, address, config, secret)
        member.landed, member.gate = landed, gate
        await member.weights.start()
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()

        async def run(number: int, name: str, params: dict[str, Any]) -> None:
            try:
                reply = (number, True, await getattr(member, name)(**params))
            except Exception as error:
                traceback.print_exc()
                reply = (number, False, (type(error).__name__, str(error)))
            pipe.send(reply)

        while True:
            try:
                command = await loop.run_in_executor(None, pipe.recv)
            except EOFError:
                return
            task = loop.create_task(run(*command))
            tasks.add(task)
            if command[1] == "close":
                await task
                return

    asyncio.run(main())


class MemberProcess:
    """A member in a process of its own, as the test sees it."""

    def __init__(
        self, who: str, address: Address, config: ReconnectConfig, secret: bytes, kind: type[Driven] = Driven
    ) -> None:
        self.who = who
        self.pipe, theirs = FORKS.Pipe()
        self.landed = FORKS.Value("q", 0)
        self.gate = FORKS.Event()
        arguments = (kind, who, address, config, secret, theirs, self.landed, self.gate)
        self.process = FORKS.Process(target=_child, args=arguments)
        self.process.start()
        theirs.close()
        self.number = 0
        self.answers: dict[int, Any] = {}

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def begin(self, name: str, **params: Any) -> int:
        self.number += 1
        self.pipe.send((self.number, name, params))
        return self.number

    def end(self, number: int, timeout: float = 30.0) -> Any:
        limit = time.monotonic() + timeout
        while number not in self.answers:
            assert self.pipe.poll(max(limit - time.monotonic(), 0)), f"{self.who} gave no answer in {timeout} s"
            got, good, value = self.pipe.recv()
            self.answers[got] = (good, value)
        good, value = self.answers.pop(number)
        if not good:
            raise RemoteFailure(*value)
        return value

    def ask(self, name: str, **params: Any) -> Any:
        return self.end(self.begin(name, **params))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self.pipe.close()


class RemoteFailure(Exception):
    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class Rig:
    """A directory on a loop thread of the test's process, and members around it."""

    def __init__(self, config: ReconnectConfig) -> None:
        self.config = config
        self.events: list[Any] = []
        self.members: list[MemberProcess] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.address = Address("127.0.0.1", 0)
        self.service: DirectoryService
        self.host_directory()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def call(self, act: Callable[[], Any]) -> Any:
        """Does something on the directory's loop."""

        async def there() -> Any:
            return act()

        return self.run(there())

    def host_directory(self) -> None:
        """Begins (or begins anew, on the same port) with an empty directory."""

        async def start() -> None:
            self.service = DirectoryService(Directory(avoid_s=3.0), self.events.append)
            self.server = RpcServer(self.service.handle, Secret(SECRET), bind("127.0.0.1", self.address.port))
            self.address = self.server.address
            await self.server.start()

        self.run(start())

    def lose_directory(self) -> None:
        self.run(self.server.close())

    def member(self, who: str, *, secret: bytes = SECRET, kind: type[Driven] = Driven) -> MemberProcess:
        member = MemberProcess(who, self.address, self.config, secret, kind)
        self.members.append(member)
        return member

    def close(self) -> None:
        for member in self.members:
            member.kill()
        self.run(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


def wait_until(true: Callable[[], bool], timeout: float = 15.0) -> None:
    limit = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < limit, "the condition did not come true in time"
        time.sleep(0.01)
