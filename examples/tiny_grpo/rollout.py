"""A rollout: generates the answers to the prompts that it leases, token by token."""

from __future__ import annotations

import torch

import robustrl
from tiny_grpo import job
from tiny_grpo.model import Model
from tiny_grpo.sampling import GroupDecoder
from tiny_grpo.task import reward


@torch.inference_mode()
def run(model: Model) -> None:
    settings = job.settings()
    with robustrl.guard(role="rollout", weights=model.state_dict()) as me:
        for lease in me.leases():
            prompt = list(lease.prompt)
            answers = [list(ids) for ids in lease.saved]
            open_samples = {sample for sample, done in enumerate(lease.finished) if not done}
            with me.phase("generate"):
                decoder = GroupDecoder(model, settings, lease.prompt_index, prompt, lease.saved, lease.finished)
                while not lease.lost:
                    for sample in [s for s in open_samples if decoder.finished(s)]:
                        open_samples.remove(sample)
                        lease.finish(sample, reward(prompt, answers[sample]))
                    if not open_samples:
                        break
                    for sample, token, logprob in decoder.advance():
                        answers[sample].append(token)
                        lease.append(sample, token, logprob)


if __name__ == "__main__":
    run(job.warm_model())
