"""A warm standby: imports and model are ready, and it becomes a trainer or a rollout when one is lost."""

from __future__ import annotations

import robustrl
from tiny_grpo import job, rollout, trainer

if __name__ == "__main__":
    robustrl.standby(prepare=job.warm_model, roles={"trainer": trainer.run, "rollout": rollout.run})
