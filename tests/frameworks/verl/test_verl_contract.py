"""The places in verl that the adapter patches are what it was written for, in the verl that is installed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from robustrl.attach import applied, undo_all, wrap
from robustrl.attach.patches import parameters
from robustrl.errors import AttachError, ConfigError
from robustrl_verl.plugin import MAIN, OURS, SEAMS, entry, targets, with_engine


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    undo_all()


@pytest.mark.parametrize("name", SEAMS)
def test_every_seam_is_there_with_its_parameters_and_its_kind(name: str) -> None:
    module = importlib.import_module(name)
    for path, expect, ours in SEAMS[name]:
        part, _, function = ours.partition(":")
        wrapper = getattr(importlib.import_module(part), function)
        patch = wrap(module, path, wrapper, expect=expect)
        if inspect.iscoroutinefunction(patch.after):
            assert inspect.iscoroutinefunction(wrapper), f"{ours} must be async"
    assert set(targets(name)) <= set(applied())
    undo_all()
    assert applied() == []


def test_what_the_adapter_calls_and_reads_is_there() -> None:
    """Not patched, but relied upon."""
    wanted: dict[str, dict[str, str]] = {
        "verl.checkpoint_engine.base": {
            "CheckpointEngineManager.remove_replicas": "self, replicas",
            "CheckpointEngineRegistry.register": "backend",
            "CheckpointEngineWorker.update_weights": "self, global_steps=None",
        },
        "verl.workers.rollout.replica": {
            "RolloutReplica.abort_all_requests": "self, reject_request=False",
            "RolloutReplica.resume_generation": "self",
            "RolloutReplica.release_kv_cache": "self",
            "RolloutReplica.resume_kv_cache": "self",
        },
        "verl.workers.rollout.router": {"GlobalRequestLoadBalancer.remove_servers": "self, server_ids"},
    }
    for name, methods in wanted.items():
        module = importlib.import_module(name)
        for path, expect in methods.items():
            kind, _, method = path.partition(".")
            assert parameters(getattr(getattr(module, kind), method)) == expect, path


def test_the_engine_is_registered_by_verls_own_hook() -> None:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    importlib.import_module(OURS["actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module"])
    made: Any = CheckpointEngineRegistry.new("robustrl", bucket_size=1 << 20, transport="tcp", wait_s=3.0)
    assert made.build_topology(2, 3, []) == ({}, {})
    assert made.prepare() == {}


def test_other_trainers_and_other_engines_are_refused() -> None:
    with pytest.raises(AttachError, match="cannot be run attached"):
        entry("verl.trainer.main_ppo", [])
    with pytest.raises(ConfigError, match="backend is nccl, and robustrl needs robustrl"):
        with_engine(["actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"])
    assert with_engine(["a=1"]) == ["a=1", *(f"{name}={value}" for name, value in OURS.items())]
    assert with_engine([f"+{name}={value}" for name, value in OURS.items()])[2:] == []
    assert MAIN in SEAMS
