"""Freezing from a device: what is asked of the driver, and (with a GPU) that it does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from robustrl.reconnect import weights_digest
from robustrl.reconnect.content import freeze, load
from robustrl.reconnect.memory import Pool


class FakeDriver:
    """Float tensors lie on its device."""

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.copies: list[int] = []

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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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
