"""Entry point ``verl.plugins``: registers the platform at once, and the rest when verl's own modules are there."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from verl_on_cpu import (
    platform,  # noqa: F401  (verl resolves its platform while it is being imported)
    vllm_cpu,
)
from verl_on_cpu.late import after_import


def register_replica(replica: ModuleType) -> None:
    replica.RolloutReplicaRegistry.register("light", lambda: importlib.import_module("verl_on_cpu.light").LightReplica)


def register_adapter(base: ModuleType) -> None:
    # verl has a public registry for replicas, but none for what feeds them weights.
    base._ROLLOUT_REGISTRY["light", "async"] = "verl_on_cpu.light.LightAdapter"


if os.environ.get("VERL_PLATFORM") == "cpu":
    after_import("verl.workers.rollout.replica", "verl_on_cpu.plugin:register_replica")
    after_import("verl.workers.rollout.base", "verl_on_cpu.plugin:register_adapter")
    after_import("verl.checkpoint_engine.base", "verl_on_cpu.record:watch_engines")
    vllm_cpu.install()
