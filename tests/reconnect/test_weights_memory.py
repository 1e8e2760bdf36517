"""The memory of versions: shared without a copy, used again only when nobody reads it, bounded."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_rig import Driven, Rig, fingerprint, make_tensors, wait_until

from robustrl.config import ReconnectConfig
from robustrl.errors import TransportError
from robustrl.reconnect.content import freeze
from robustrl.reconnect.memory import Mappings, Pool, Shared, StagingError


def copied(shared: Shared) -> Shared:
    """As if it had travelled over a socket."""
    return Shared(*map(os.dup, shared))


def test_a_buffer_is_written_again_only_when_its_last_reader_is_gone() -> None:
    pool, mappings, relays = Pool(), Mappings(2), Mappings(2)
    buffer = pool.take(4096)
    buffer.view[:3] = b"one"
    first = mappings.map(buffer.share(), 4096)
    second = relays.map(first.share(), 4096)  # a relay passed it on, and with it the count
    first.close()
    pool.give(buffer)
    other = pool.take(4096)
    assert other is not buffer
    assert bytes(second.view[:3]) == b"one"
    second.close()
    assert pool.take(4096) is buffer


def test_a_peers_buffer_that_comes_again_is_not_mapped_again() -> None:
    pool, mappings = Pool(), Mappings(2)
    buffer = pool.take(1 << 20)
    mapped = mappings.map(buffer.share(), 1 << 20)
    memory = mapped.memory
    mapped.close()
    pool.give(buffer)
    again = pool.take(1 << 20)
    again.view[:5] = b"again"
    mapped = mappings.map(again.share(), 1 << 20)
    assert mapped.memory is memory
    assert bytes(mapped.view[:5]) == b"again"
    with pytest.raises(TypeError):
        mapped.view[0] = 1
    assert mappings.bytes == 1 << 20


def test_memory_that_could_shrink_under_us_is_refused() -> None:
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 8192)
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(TransportError, match="could become so"):
        Mappings(1).map(Shared(fd, write), 8192)
    with pytest.raises(OSError):
        os.fstat(write)
    buffer = Pool().take(4096)
    with pytest.raises(TransportError, match="shorter"):
        Mappings(1).map(buffer.share(), 8192)


def test_what_does_not_fit_the_budget_is_refused_with_the_setting_named() -> None:
    tensors = {"a": torch.zeros(1000)}
    with pytest.raises(StagingError, match=r"4000 bytes.*staging_bytes is 3999"):
        freeze(tensors, 1024, Pool(3999))
    pool = Pool(4000)
    content = freeze(tensors, 1024, pool)
    assert (pool.own, pool.idle) == (4000, 0)
    del content
    assert (pool.own, pool.idle, pool.peak) == (4000, 4000, 4000)


@settings(max_examples=60, deadline=None)
@given(moves=st.lists(st.tuples(st.sampled_from(["publish", "drop", "read", "leave"]), st.integers(0, 3)), max_size=40))
def test_whatever_comes_and_goes_a_reader_never_sees_another_version(moves: list[tuple[str, int]]) -> None:
    pool, mappings = Pool(), Mappings(3)
    versions: list[tuple[int, Any]] = []
    readers: list[tuple[int, Any]] = []
    for number, (move, which) in enumerate(moves):
        if move == "publish":
            buffer = pool.take(4096)
            buffer.view[:8] = number.to_bytes(8, "big")
            versions.append((number, buffer))
        elif move == "drop" and versions:
            pool.give(versions.pop(which % len(versions))[1])
        elif move == "read" and versions:
            expected, buffer = versions[which % len(versions)]
            readers.append((expected, mappings.map(buffer.share(), 4096)))
        elif move == "leave" and readers:
            readers.pop(which % len(readers))[1].close()
        for expected, mapped in readers:
            assert int.from_bytes(mapped.view[:8], "big") == expected
        assert pool.own <= 4096 * (len(versions) + 2)


class Reporting(Driven):
    async def memory(self) -> Any:
        report = self.weights.memory_report()
        return {name: getattr(report, name) for name in ("held", "own", "idle", "mapped", "peak")}


def rig_of(**settings: Any) -> Rig:
    return Rig(ReconnectConfig(chunk_bytes=64 << 10, timeout_s=1.0, **settings))


def test_over_shared_memory_receivers_take_no_memory_and_outlive_the_source() -> None:
    rig = rig_of(transport="shm")
    try:
        trainer = rig.member("trainer/0#1", kind=Reporting)
        first, second = (rig.member(f"rollout/{index}#1", kind=Reporting) for index in range(2))
        for step in range(1, 7):
            digest, size = trainer.ask("publish", version=f"1.{step}", seed=step)
            for rollout in (first, second):
                assert rollout.ask("pull", newer_than=f"1.{step - 1}") == (f"1.{step}", digest)
        for rollout in (first, second):
            report = rollout.ask("memory")
            assert report["own"] == report["peak"] == 0
            assert size <= report["mapped"] <= 3 * size
        assert trainer.ask("memory")["own"] <= 4 * size
        first.signal(signal.SIGSTOP)  # it goes on reading 1.6 for as long as it lives
        for step in range(7, 12):
            digest, _ = trainer.ask("publish", version=f"1.{step}", seed=step)
            assert second.ask("pull", newer_than=f"1.{step - 1}") == (f"1.{step}", digest)
        first.signal(signal.SIGCONT)
        _, got, _ = first.ask("apply", seed=6)
        assert got == fingerprint(make_tensors(6))
        trainer.kill()
        _, got, _ = second.ask("apply", seed=11)
        assert got == fingerprint(make_tensors(11))
    finally:
        rig.close()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_version_above_the_budget_is_refused_by_who_would_have_to_stage_it(transport: str) -> None:
    rig = rig_of(transport=transport)
    try:
        trainer = rig.member("trainer/0#1", kind=Reporting)
        trainer.ask("publish", version="1.1", seed=1, mib=2.0)
        rig.config = ReconnectConfig(transport=transport, staging_bytes=1 << 20)  # type: ignore[arg-type]
        small = rig.member("rollout/0#1", kind=Reporting)
        if transport == "shm":
            assert small.ask("pull")[0] == "1.1"
        else:
            with pytest.raises(Exception, match=r"StagingError: .*reconnect.staging_bytes is 1048576"):
                small.ask("pull")
            assert not [event for event in rig.events if "gave up" in getattr(event, "text", "")]
        trainer.ask("publish", version="1.2", seed=2, mib=0.2)
        assert small.ask("pull", newer_than="1.1")[0] == "1.2"
        assert small.ask("memory")["peak"] <= 1.05 * (1 << 20)
    finally:
        rig.close()


class Waiting(Driven):
    async def released(self, version: str, relays: int, timeout: float) -> bool:
        from robustrl.roles import Version

        return bool(await self.weights.released(Version.parse(version), relays, timeout))

    async def drop(self, version: str) -> None:
        from robustrl.roles import Version

        await self.weights.drop(Version.parse(version))


def test_a_trainer_hears_when_relays_have_a_version_and_is_needed_no_more() -> None:
    rig = rig_of(transport="tcp")
    try:
        trainer = rig.member("trainer/0#1", kind=Waiting)
        digest, _ = trainer.ask("publish", version="1.1", seed=1)
        assert trainer.ask("released", version="1.1", relays=1, timeout=0.1) is False
        waiting = trainer.begin("released", version="1.1", relays=2, timeout=15.0)
        for index in range(2):
            rig.member(f"rollout/{index}#1").ask("pull")
        assert trainer.end(waiting) is True
        trainer.ask("drop", version="1.1")
        assert trainer.ask("stats")["held"] == []
        late = rig.member("rollout/2#1")
        assert late.ask("pull") == ("1.1", digest)
    finally:
        rig.close()


def test_a_process_killed_with_a_mapping_counts_as_gone() -> None:
    pool = Pool()
    buffer = pool.take(4096)
    shared = buffer.share()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    shared.close()
    pool.give(buffer)
    assert pool.take(4096) is not buffer
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
    wait_until(buffer.unread)
