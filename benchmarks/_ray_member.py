"""The Ray actor of the benchmarks, alone in its module: Ray's workers import it, and numpy is all they need."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

TENSORS = 16


class RayMember:
    """An actor with live weights."""

    def __init__(self) -> None:
        self.live: dict[str, np.ndarray[Any, Any]] = {}

    def allocate(self, size: int) -> None:
        self.live = {f"layer.{index:02}": np.arange(size // TENSORS // 4, dtype=np.float32) for index in range(TENSORS)}

    def prepare(self, step: int) -> None:
        for array in self.live.values():
            array[::1024] = step

    def give(self) -> tuple[float, list[Any], float]:
        import ray

        began = time.monotonic()
        ref = ray.put(self.live)
        return began, [ref], time.monotonic()

    def receive(self, refs: list[Any], step: int) -> float:
        import ray

        got = ray.get(refs[0])
        for name, array in self.live.items():
            np.copyto(array, got[name])
        done = time.monotonic()
        if any(array[0] != step for array in self.live.values()):
            raise AssertionError(f"the weights of step {step} did not arrive")
        return done
