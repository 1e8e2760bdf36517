"""Freezing from a device: what is asked of the driver, and (with a GPU) that it does it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from weights_rig import Driven, Rig, fingerprint, make_tensors

from robustrl.config import ReconnectConfig, RobustConfig
from robustrl.errors import ConfigError
from robustrl.reconnect import cuda, weights_digest
from robustrl.reconnect.content import freeze, load
from robustrl.reconnect.memory import Pool

NEEDS_UCX = pytest.mark.skipif(not importlib.util.find_spec("ucxx"), reason="needs ucxx")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class FakeDriver:
    """Float tensors lie on its device, whose memory is the host's."""

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.copies: list[int] = []
        self.allocated: list[int] = []

    def allocate(self, size: int) -> torch.Tensor:
        self.allocated.append(size)
        return torch.empty(size, dtype=torch.uint8)

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point()

    def pin(self, address: int, size: int) -> Callable[[], None]:
        self.pinned.append(size)
        return lambda: self.pinned.remove(size)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.copies.append(len(pairs))
        for target, source in pairs:
            target.copy_(source)


def test_a_buffer_is_pinned_once_and_all_tensors_of_a_device_are_copied_together() -> None:
    driver, pool = FakeDriver(), Pool()
    tied = torch.randn(500)
    tensors = {"a": tied, "b": tied, "c": torch.randn(3, 4).t(), "n": torch.arange(7), "none": torch.empty(0)}
    for _ in range(3):
        content = freeze(tensors, 256, pool, driver=driver)
        assert content.digest == weights_digest(tensors, 256)
        del content
    assert driver.copies == [2, 2, 2]
    assert len(driver.pinned) == 1
    pool.clear()
    assert driver.pinned == []


class OnDevice(Driven):
    """Its versions lie in the memory of a device: a real one if there is one."""

    def __init__(self, *args: Any) -> None:
        self.driver = cuda.find_driver() or FakeDriver()
        cuda.find_driver = lambda: self.driver  # type: ignore[assignment]
        super().__init__(*args)

    async def device(self) -> tuple[list[int], list[str]]:
        """(allocations, kinds of buffers that hold versions)"""
        kinds = [type(content.buffer).__name__ for content in self.weights._holder.contents.values()]
        return getattr(self.driver, "allocated", []), kinds


def pulled_in_device_memory(rig: Rig) -> list[tuple[list[int], list[str]]]:
    """A version goes from a trainer to one rollout and from there to another; then the next, partly alike."""
    trainer, first, second = (rig.member(who, kind=OnDevice) for who in ("trainer/0#1", "rollout/0#1", "rollout/1#1"))
    digest, size = trainer.ask("publish", version="1.1", seed=1, mutate=True)
    assert first.ask("pull") == ("1.1", digest)
    assert first.ask("apply", seed=1)[0] == digest
    trainer.kill()
    rig.members.remove(trainer)
    assert second.ask("pull") == ("1.1", digest)
    assert second.ask("stats")["sources"] == [["rollout/0#1"]]
    assert second.ask("apply", seed=1)[:2] == (digest, fingerprint(make_tensors(1)))
    assert first.ask("stats")["served"] == second.ask("stats")["pulled"] <= size
    second.ask("spoil")
    third = rig.member("rollout/2#1", kind=OnDevice)
    first.kill()
    rig.members.remove(first)
    assert third.ask("pull", timeout=2.0) is None  # what is spoiled in a device's memory is found as well
    assert third.ask("stats")["corrupt"] >= 1
    return [member.ask("device") for member in (second, third)]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(ReconnectConfig(transport="ucx", memory="device", chunk_bytes=64 << 10, timeout_s=2.0))
    yield rig
    rig.close()


@NEEDS_UCX
def test_versions_in_device_memory_travel_over_ucx_from_member_to_member(rig: Rig) -> None:
    (allocated, kinds), (theirs, _) = pulled_in_device_memory(rig)
    assert kinds == ["DeviceBuffer"]
    if not torch.cuda.is_available():
        assert len(allocated) == 1
        assert len(theirs) == 1


@pytest.mark.gpu
@NEEDS_GPU
@NEEDS_UCX
def test_versions_travel_over_ucx_between_gpus(rig: Rig) -> None:
    pulled_in_device_memory(rig)


def test_device_memory_needs_ucx_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="travel over UCX alone"):
        RobustConfig.from_dict({"reconnect": {"memory": "device"}})
    monkeypatch.setattr(cuda, "find_driver", lambda: None)
    with pytest.raises(ConfigError, match="torch can use no GPU"):
        cuda.device_driver()


@pytest.mark.gpu
@NEEDS_GPU
def test_a_version_is_frozen_from_a_gpu_and_loaded_into_one() -> None:
    pool = Pool()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        here = {"a": torch.randn(1 << 20, generator=generator), "b": torch.randn(64, 32).to(torch.bfloat16).t()}
        there = {name: tensor.cuda() for name, tensor in here.items()}
        content = freeze(there, 1 << 20, pool)
        for tensor in there.values():
            tensor.zero_()
        assert content.digest == weights_digest(here, 1 << 20)
        assert load(content, there) == content.digest
        assert all(torch.equal(there[name].cpu(), tensor) for name, tensor in here.items())
        del content
