"""A trainer and rollout workers with a fake engine: 10 buckets of 1 MiB a version, 20 tokens/s a rollout.

Token i of a prompt is a hash of (prompt, digest of the loaded weights, i), so every token shows the weights that made
it. The engine keeps the prompts' prefixes, each with the digest that computed it, as a KV cache does.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from weights_rig import Driven, MemberProcess, Rig, fingerprint

from robustrl.reconnect import HeldVersion
from robustrl.reconnect.transports import base, tcp
from robustrl.roles import Identity, Version

BUCKETS: Final = 10
BUCKET: Final = 1 << 20
PEER_LIMIT_S: Final = 2.0
TOKEN_S: Final = 0.05
SYSTEM_PROMPT: Final = "You are a careful assistant. "


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{index}": torch.randn(BUCKET // 4, generator=generator) for index in range(BUCKETS)}


def expected(seed: int) -> dict[str, str]:
    return fingerprint(weights(seed))


def token(prompt: str, digest: str, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{prompt}/{digest}/{index}".encode()).digest()[:4], "big")


class Token(NamedTuple):
    """`version` and `digest` made it; `prefix` computed the prefix that it was made with."""

    value: int
    version: str
    digest: str
    prefix: str


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Logged(Driven):
    """A member whose log the test can read."""

    def __init__(self, *args: Any) -> None:
        # Ten buckets would vanish into larger buffers, and no transfer would be half done.
        tcp.SOCKET_BUFFER = 128 << 10
        super().__init__(*args)
        self.records = _Records()
        logging.getLogger("robustrl.reconnect").addHandler(self.records)

    async def log(self) -> list[str]:
        return list(self.records.lines)


class Trainer(Logged):
    async def publish_weights(self, version: str, seed: int) -> str:
        tensors = weights(seed)
        done = await self.weights.publish(tensors, Version.parse(version))
        for tensor in tensors.values():
            tensor.zero_()  # the next optimizer step
        return str(done.digest)

    async def serve_slowly(self, pause_s: float) -> None:
        """From now on the trainer rests after each bucket: receivers cannot have read ahead when it dies."""
        given = base.Conversation.gave

        def gave(talk: base.Conversation, count: int) -> None:
            given(talk, count)
            time.sleep(pause_s)

        base.Conversation.gave = gave  # type: ignore[method-assign]


class Engine:
    """What generates. `keyed`: prefixes are kept under the digest of the weights as well as the prompt."""

    def __init__(self, keyed: bool) -> None:
        self.keyed = keyed
        self.prefixes: dict[tuple[str, ...], str] = {}
        self.hits = 0
        self.refuses = False

    def clear(self) -> None:
        if self.refuses:
            raise RuntimeError("the prefix cache is busy and was not cleared")
        self.prefixes.clear()

    def prefix(self, prompt: str, digest: str) -> str:
        """The digest whose weights computed the prefix that a new request starts from."""
        key = (prompt, digest) if self.keyed else (prompt,)
        self.hits += key in self.prefixes
        return self.prefixes.setdefault(key, digest)


class Worker(Logged):
    """A rollout: follows the weights when told to, generates, and answers about its health meanwhile."""

    clears = True
    keyed = False

    def __init__(self, *args: Any) -> None:
        self.engine = Engine(self.keyed)
        self.phase = "generate"
        self.live = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
        self.done: list[list[Token]] = []
        self.made = 0
        self.running = 0
        self.failures: list[str] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        super().__init__(*args)

    def options(self) -> dict[str, Any]:
        return {"on_apply": self.changed} if self.clears else {}

    def changed(self, held: HeldVersion) -> None:
        self.engine.clear()

    async def sync(self, newer_than: str | None = None, timeout: float = 20.0) -> tuple[str, str] | None:
        """Pulls and loads the newest version."""
        newer = None if newer_than is None else Version.parse(newer_than)
        self.phase = "sync"
        try:
            held = await self.weights.pull(newer, timeout=timeout)
            if held is None:
                return None
            return str(held.version), self.weights.apply(held, self.live)
        finally:
            self.phase = "generate"

    async def twice(self, newer_than: str | None = None) -> Any:
        """Two calls of everything at once."""
        newer = None if newer_than is None else Version.parse(newer_than)
        first, second = await asyncio.gather(*(self.weights.pull(newer, timeout=20.0) for _ in range(2)))
        loads = (asyncio.to_thread(self.weights.apply, held, self.live) for held in (first, second))
        return [str(held.version) for held in (first, second)], await asyncio.gather(*loads)

    async def follow(self) -> None:
        self._spawn(self._follow())

    async def _follow(self) -> None:
        newest: Version | None = None
        while True:
            held = await self.weights.pull(newest, timeout=60.0)
            if held is None:
                continue
            newest = held.version
            try:
                self.weights.apply(held, self.live)
            except RuntimeError as error:
                self.failures.append(str(error))

    async def again(self) -> str:
        """Loads what it holds once more: how a member whose `apply` failed comes back."""
        newest = self.weights.held()[-1]
        held = await self.weights.pull(step=newest.step, timeout=5.0)
        return str(self.weights.apply(held, self.live))

    async def refuse(self, refuses: bool) -> None:
        self.engine.refuses = refuses

    async def health(self) -> dict[str, Any]:
        held = self.weights.applied
        return {
            "phase": self.phase,
            "serving": held is not None,
            "version": None if held is None else str(held.version),
            "digest": None if held is None else held.digest,
            "tokens": self.made,
            "running": self.running,
            "failures": list(self.failures),
        }

    async def live_weights(self) -> dict[str, str]:
        return fingerprint(self.live)

    async def generate(self, prompt: str, tokens: int, token_s: float = TOKEN_S, into: str = "") -> list[Token]:
        """Answers one request: `tokens` long, or longer, until one was made by version `into`. Raises RuntimeError
        while there are no usable weights.

        The rule for requests that run when the weights change: they go on with the new weights on their old prefix,
        and each token says so.
        """
        held = self.weights.applied
        if held is None:
            raise RuntimeError("no usable weights: this worker does not serve")
        prefix = self.engine.prefix(prompt, held.digest)
        self.running += 1
        answer: list[Token] = []
        for index in itertools.count():
            while (held := self.weights.applied) is None:  # noqa: ASYNC110  (the engine's scheduler looks again)
                await asyncio.sleep(0.005)
            answer.append(Token(token(prompt, held.digest, index), str(held.version), held.digest, prefix))
            self.made += 1
            if len(answer) >= tokens and into in ("", answer[-1].version):
                self.running -= 1
                return answer
            await asyncio.sleep(token_s)
        raise AssertionError("unreachable")

    async def start_rollouts(self, count: int, tokens: int) -> None:
        async def roll(index: int) -> None:
            self.done.append(await self.generate(f"{self.identity}/{index}", tokens))

        for index in range(count):
            self._spawn(roll(index))

    async def rollouts(self) -> list[list[Token]]:
        return self.done

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class KeyedWorker(Worker):
    """An engine that does not clear: its cache's keys hold the digest instead."""

    clears = False
    keyed = True


class NaiveWorker(Worker):
    """What must be found out: prompts are the only keys and nothing is cleared."""

    clears = False


class Fleet:
    """A trainer and three workers that hold and have loaded version 1.1 (seed 1)."""

    def __init__(self, rig: Rig, kind: type[Worker] = Worker) -> None:
        self.rig = rig
        self.kind = kind
        self.trainer = rig.member("trainer/0#1", kind=Trainer)
        self.workers = [rig.member(f"rollout/{index}#1", kind=kind) for index in range(3)]
        self.digests = {"1.1": self.publish("1.1", 1)}
        for worker in self.workers:
            assert worker.ask("sync") == ("1.1", self.digests["1.1"])

    def publish(self, version: str, seed: int) -> str:
        digest: str = self.trainer.ask("publish_weights", version=version, seed=seed)
        return digest

    def pids(self) -> list[int]:
        return [worker.pid for worker in self.workers]

    def fence(self, who: str) -> None:
        """What the supervisor does at a verdict: from now on only `who` or a later one speaks for this member."""
        identity = Identity.parse(who)
        self.rig.call(lambda: self.rig.service.fence(identity.member, identity.incarnation))

    def holders(self, version: str) -> list[str]:
        return [str(who) for who in self.rig.call(lambda: self.rig.service.directory.holders(Version.parse(version)))]


def loaded(worker: MemberProcess, seed: int) -> bool:
    got: Mapping[str, str] = worker.ask("live_weights")
    return got == expected(seed)
