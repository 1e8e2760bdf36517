"""From a GPU into a version's buffer: a thin boundary around what torch offers of CUDA. Not run on hardware so far.

The buffer is registered with the driver once (page-locked), so that copies run at the bus's full speed, and stays so
for as long as it is used again. The copies of all tensors are queued and waited for together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from robustrl.errors import WeightError

if TYPE_CHECKING:
    import torch


class Driver(Protocol):
    """What freezing needs of a device."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on a device of this driver."""
        ...

    def pin(self, address: int, size: int) -> Callable[[], None]:
        """Page-locks host memory and returns what undoes it. Raises WeightError when the driver refuses."""
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

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        import torch

        devices = {source.device for _, source in pairs}
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
