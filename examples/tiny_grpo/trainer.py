"""The trainer: an ordinary loop. What robustrl adds are the lines that mention `robustrl` or `me`."""

from __future__ import annotations

from itertools import groupby

import msgspec

import robustrl
from robustrl.persist import Batch
from tiny_grpo import job
from tiny_grpo.grpo import Group, Sample, optimizer, train_step
from tiny_grpo.model import Model


def groups(batch: Batch) -> list[Group]:
    """A batch of the ledger as the groups of GRPO: one a prompt, with all of its samples."""
    return [
        Group(list(samples[0].prompt), [Sample(s.ids(), s.logprobs(), s.reward or 0.0) for s in samples])
        for samples in (list(one) for _, one in groupby(batch.trajectories, key=lambda s: s.group))
    ]


def run(model: Model) -> None:
    settings = job.settings()
    optim = optimizer(model, settings)
    with robustrl.guard(role="trainer", state={"model": model, "optim": optim}) as me:
        me.publish(model.state_dict())
        for batch in me.batches():
            with me.phase("train"):
                metrics = train_step(model, optim, groups(batch), settings)
            me.step_done(msgspec.structs.asdict(metrics))
            me.publish(model.state_dict())


if __name__ == "__main__":
    run(job.warm_model())
