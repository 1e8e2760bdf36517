"""The hub and its fleet with real Ray actors in the place of verl's: who is lost is noticed and taken out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from robustrl.events import MemberMoved, PlanMade, VerdictReached, of_kind, read_events
from robustrl_verl.fleet import probe

ray = pytest.importorskip("ray")

ENGINE_S = 3.0
"""As the session of `attached_ray` says."""


class Engine:
    """An engine in a process of its own, as far as its actor knows it."""

    def __init__(self) -> None:
        self.errored = False
        self.runs = asyncio.Event()
        self.runs.set()

    async def check_health(self) -> None:
        if self.errored:
            raise RuntimeError("EngineCore is dead")

    async def is_sleeping(self) -> bool:
        await self.runs.wait()
        return False


class Server:
    def __init__(self) -> None:
        self.engine = Engine()

    async def robustrl_probe(self) -> None:
        await probe(self)

    async def pid(self) -> int:
        return os.getpid()

    async def freeze_engine(self) -> None:
        self.engine.runs.clear()

    async def break_engine(self) -> None:
        self.engine.errored = True


class Balancer:
    def __init__(self) -> None:
        self.removed: list[str] = []

    def remove_servers(self, server_ids: list[str]) -> None:
        self.removed += server_ids

    def get_removed(self) -> list[str]:
        return self.removed


class Rollouter:
    """Carries the lists that verl keeps of its replicas."""

    def __init__(self, addresses: list[str]) -> None:
        self.llm_server_manager = SimpleNamespace(
            server_addresses=list(addresses),
            server_handles=list(addresses),
            rollout_replicas=[SimpleNamespace(_server_address=address) for address in addresses],
        )
        self.updates = 0

    def _update_max_concurrent_samples(self) -> None:
        self.updates += 1

    def seen(self) -> tuple[list[str], int, int]:
        manager = self.llm_server_manager
        return manager.server_addresses, len(manager.rollout_replicas), self.updates


class Cluster:
    """Replicas at addresses ``a``, ``b`` ... and a hub that watches them."""

    def __init__(self, folder: Path, replicas: int) -> None:
        from robustrl_verl.hub import start_hub

        remote: Any = ray.remote(num_cpus=0)
        self.folder = folder
        self.addresses = [chr(ord("a") + number) for number in range(replicas)]
        self.servers = {address: remote(Server).remote() for address in self.addresses}
        self.balancer = remote(Balancer).remote()
        self.rollouter = remote(Rollouter).remote(self.addresses)
        self.hub = start_hub()
        said = [
            {"rank": rank, "address": address, "servers": [self.servers[address]], "workers": []}
            for rank, address in enumerate(self.addresses)
        ]
        for _ in range(2):  # naming them again changes nothing
            ray.get(self.hub.watch.remote(said, self.balancer, self.rollouter), timeout=60)
        self.pids = {address: self.get(server.pid.remote()) for address, server in self.servers.items()}

    def get(self, ref: Any) -> Any:
        return ray.get(ref, timeout=60)

    def dead(self) -> dict[str, str]:
        found: dict[str, str] = self.get(self.hub.dead.remote())
        return found


Make = Callable[[int], Cluster]


@pytest.fixture
def cluster(attached_ray: Path) -> Make:
    return lambda replicas: Cluster(attached_ray, replicas)


def test_lost_replicas_leave_routing_lists_and_machine_until_none_is_left(
    cluster: Make, wait_until: Callable[..., Any]
) -> None:
    job = cluster(4)
    os.kill(job.pids["a"], signal.SIGKILL)
    wait_until(lambda: "a" in job.dead(), 20, "the killed one is noticed")
    wait_until(lambda: job.get(job.rollouter.seen.remote()) == (["b", "c", "d"], 3, 1), 20, "verl's lists follow")

    job.servers["b"].break_engine.remote()
    wait_until(lambda: "b" in job.dead(), 20, "the dead engine in a living actor is noticed")
    job.servers["c"].freeze_engine.remote()
    began = time.monotonic()
    wait_until(lambda: "c" in job.dead(), 30, "the frozen engine in a living actor is noticed")
    assert time.monotonic() - began >= ENGINE_S
    wait_until(lambda: not Path(f"/proc/{job.pids['c']}").exists(), 20, "what was condemned is ended")
    assert job.get(job.hub.failure.remote(0.0)) == ""

    os.kill(job.pids["d"], signal.SIGSTOP)
    cause = job.get(job.hub.failure.remote(40.0))
    assert cause.startswith("no rollout replica is left; the first loss: rollout/0#1 was lost")
    assert job.get(job.balancer.get_removed.remote()) == ["a", "b", "c", "d"]
    wait_until(lambda: not Path(f"/proc/{job.pids['d']}").exists(), 20, "also one that was stopped")
    dead = job.dead()
    assert "rollout/1#1 is useless: EngineCore is dead" in dead["b"]
    assert "rollout/2#1 has not answered for 3 s" in dead["c"]
    assert "rollout/3#1 has not answered for 3 s" in dead["d"]

    said = read_events(job.folder / "events.jsonl")
    assert [event.verdict for event in of_kind(said, VerdictReached)] == ["dead", "dead", "hung", "hung"]
    assert [event.actions for event in of_kind(said, PlanMade)] == [
        ("go on without rollout/0",),
        ("go on without rollout/1",),
        ("go on without rollout/2",),
        ("give up",),
    ]
    ends = [event.member for event in of_kind(said, MemberMoved) if event.after == "dead"]
    assert ends == [f"rollout/{number}" for number in range(4)]


def test_a_report_counts_once_and_the_hub_comes_back_after_its_own_death(
    cluster: Make, wait_until: Callable[..., Any]
) -> None:
    job = cluster(2)
    for _ in range(3):
        job.get(job.hub.lost.remote("a", "was lost under a request"))
    assert list(job.dead()) == ["a"]
    assert len(list(of_kind(read_events(job.folder / "events.jsonl"), VerdictReached))) == 1
    contact = job.get(job.hub.contact.remote())
    assert job.get(job.hub.begin.remote("trainer", 0)) == 1
    assert job.get(job.hub.begin.remote("trainer", 0)) == 2

    pid = job.get(job.hub.__ray_call__.remote(own_pid))
    os.kill(pid, signal.SIGKILL)

    def again() -> Any:
        with contextlib.suppress(ray.exceptions.RayActorError):
            return job.get(job.hub.contact.remote())
        return None

    fresh = wait_until(again, 30, "the hub is back")
    assert fresh[1] == contact[1], "with the secret that members have"
    job.get(job.hub.resume.remote("trainer", 0, 2))
    assert job.get(job.hub.begin.remote("trainer", 0)) == 3


def own_pid(actor: Any) -> int:
    return os.getpid()
