"""The reference job: which processes it is made of, and where each finds its settings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import torch

from robustrl.config import RobustConfig
from robustrl.restart import JobSpec, RoleSpec
from tiny_grpo import warmup
from tiny_grpo.model import Model
from tiny_grpo.settings import Settings

SETTINGS = "TINY_GRPO_SETTINGS"
WARM_WEIGHTS = "TINY_GRPO_WARM_WEIGHTS"


def describe(
    settings: Settings,
    warm_weights: Path,
    config: RobustConfig,
    *,
    rollouts: int = 3,
    standbys: int = 1,
    prefix: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> JobSpec:
    """The job as robustrl starts it.

    Args:
        settings: the job's settings.
        warm_weights: the file that `warmup.ensure` wrote.
        config: robustrl's settings.
        rollouts, standbys: how many of each.
        prefix: put before each trainer's and standby's script (a wrapper that injects faults).
        env: set for all members.
    """
    folder = Path(__file__).parent

    def script(name: str, *, wrapped: bool = False) -> tuple[str, ...]:
        return (sys.executable, *(prefix if wrapped else ()), str(folder / name))

    return JobSpec(
        roles=(
            RoleSpec("manager", script("manager.py")),
            RoleSpec("trainer", script("trainer.py", wrapped=True)),
            RoleSpec("rollout", script("rollout.py"), rollouts),
            RoleSpec("standby", script("standby.py", wrapped=True), standbys, ("trainer", "rollout")),
        ),
        config=config,
        env={
            SETTINGS: msgspec.json.encode(settings).decode(),
            WARM_WEIGHTS: str(warm_weights.absolute()),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(folder.parent), os.environ.get("PYTHONPATH")])),
            # Five processes share the machine, and one thread each is what makes results repeatable to the bit.
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        | (env or {}),
    )


def settings() -> Settings:
    """This process's settings."""
    return msgspec.json.decode(os.environ[SETTINGS], type=Settings)


def warm_model() -> Model:
    """The model that post-training starts from."""
    torch.set_num_threads(1)
    return warmup.load(Path(os.environ[WARM_WEIGHTS]), settings())
