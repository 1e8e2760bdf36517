"""Between GPUs and versions: a thin boundary around what torch offers of CUDA. Not run on hardware so far.

Buffers in host memory are registered with the driver once (page-locked), so that copies run at the bus's full speed,
and stay so for as long as they are used again. Buffers in GPU memory are torch's own tensors: UCX takes them by their
CUDA array interface, and what is written into them is done when `copy` returns, because UCX knows nothing of streams.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from robustrl.errors import ConfigError, WeightError

if TYPE_CHECKING:
    import torch


class Driver(Protocol):
    """What versions need of a device."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on a device of this driver."""
        ...

    def pin(self, address: int, size: int) -> Callable[[], None]:
        """Page-locks host memory and returns what undoes it. Raises WeightError when the driver refuses."""
        ...

    def allocate(self, size: int) -> torch.Tensor:
        """`size` bytes of the device's memory. Raises WeightError when there are not so many."""
        ...

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies (to, from) pairs once all work on the sources is done, and returns when the last has arrived."""
        ...


class TorchDriver:
    """CUDA as torch gives it."""

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def pin(self, address: int, size: int) -> Callable[[], None]:
        import torch

        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        failed = int(runtime.cudaHostRegister(address, size, 0))
        if failed:
            raise WeightError(f"CUDA does not page-lock {size} bytes", why=f"cudaHostRegister returned {failed}")
        return lambda: runtime.cudaHostUnregister(address) and None

    def allocate(self, size: int) -> torch.Tensor:
        import torch

        try:
            return torch.empty(size, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            raise WeightError(f"the GPU has no {size} bytes for a weight version", why=str(error)) from error

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        import torch

        devices = {tensor.device for pair in pairs for tensor in pair if tensor.is_cuda}
        for device in devices:
            torch.cuda.synchronize(device)  # the caller may have computed on another stream than ours
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)


@functools.cache
def find_driver() -> Driver | None:
    """The driver of this machine, or None where there is no GPU that torch can use."""
    import torch

    return TorchDriver() if torch.cuda.is_available() else None


def device_driver() -> Driver:
    """The driver of this machine. Raises ConfigError where there is no GPU that torch can use."""
    driver = find_driver()
    if driver is None:
        raise ConfigError(
            "reconnect.memory is 'device' and torch can use no GPU here",
            do="Leave reconnect.memory at 'host', or give this process a GPU.",
        )
    return driver
