"""A warm standby: imports and model are ready, and it becomes a trainer or a rollout when one is lost."""

from __future__ import annotations

import robustrl
from tiny_grpo import job, rollout, trainer
from tiny_grpo.grpo import optimizer
from tiny_grpo.model import Model


def prepare() -> Model:
    model = job.warm_model()
    optimizer(model, job.settings())  # torch imports what optimizers need at the first one
    return model


if __name__ == "__main__":
    robustrl.standby(prepare=prepare, roles={"trainer": trainer.run, "rollout": rollout.run})
