"""verl's platform for machines without an accelerator. Ray is told that there are GPUs; nothing is ever put on one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _Device(ModuleType):
    """What verl asks of ``torch.cuda``."""

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> str:
        return "cpu"

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def _nothing(self, *_: Any) -> None: ...

    set_device = synchronize = empty_cache = ipc_collect = reset_peak_memory_stats = _nothing

    def _no_bytes(self, *_: Any) -> int:
        return 0

    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = _no_bytes


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """Chosen with ``VERL_PLATFORM=cpu``."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("cpu")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM") == "cpu"

    def current_device(self) -> Any:
        return "cpu"  # verl gives it to torch as it is

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # the only name besides NPU that verl counts; ray.init gets as many as a test wants

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def each_device_once(backend: str) -> str:
    """verl writes ``cpu:gloo,{device}:{backend}``, here ``cpu:gloo,cpu:gloo``, which torch refuses."""
    return ",".join(dict.fromkeys(backend.split(",")))


_init_process_group = torch.distributed.init_process_group


def _init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    _init_process_group(each_device_once(backend) if isinstance(backend, str) else backend, *args, **kwargs)


if os.environ.get("VERL_PLATFORM") == "cpu":
    torch.distributed.init_process_group = _init
