"""Group-relative policy optimisation on samples of older weights.

The advantage of a sample is its reward less the mean of its group: no value network, and no division by the group's
deviation, which would weigh nearly solved and nearly hopeless prompts above the rest. The log-probs that were stored
with each token when it was drawn stand for the policy that drew it, however many versions old; the ratio to them is
clipped as in PPO. Tensors have the shapes that the settings fix, whatever the answers' lengths, so that equal inputs
give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from tiny_grpo.model import Model
from tiny_grpo.settings import Settings
from tiny_grpo.task import PAD


class Sample(msgspec.Struct, frozen=True):
    """One finished answer. `ids` and `logprobs` are of equal length, the log-probs those of the drawing policy."""

    ids: list[int]
    logprobs: list[float]
    reward: float


class Group(msgspec.Struct, frozen=True):
    """The samples of one prompt."""

    prompt_ids: list[int]
    samples: list[Sample]


class Metrics(msgspec.Struct, frozen=True):
    """What one step did. Ratios are new over old probability of a token, measured before its update."""

    reward: float
    loss: float
    entropy: float
    ratio_mean: float
    ratio_max: float
    clipped: float
    grad_norm: float


class Batch(msgspec.Struct, frozen=True):
    """Groups as tensors, rows = groups x samples. `tokens` is ``[rows, context]``, `targets`, `old` and `mask`
    ``[rows, answer_tokens]``, `advantages` ``[rows]``."""

    tokens: Tensor
    targets: Tensor
    old: Tensor
    mask: Tensor
    advantages: Tensor
    reward: float


def collate(groups: Sequence[Group], settings: Settings) -> Batch:
    """Pad groups to the settings' shapes. Raises ValueError for a group that does not fit them."""
    width = settings.answer_tokens
    rows = len(groups) * settings.samples_per_prompt
    tokens = torch.full((rows, settings.context), PAD)
    targets = torch.full((rows, width), PAD)
    old = torch.zeros(rows, width)
    mask = torch.zeros(rows, width)
    rewards = torch.zeros(len(groups), settings.samples_per_prompt)
    row = 0
    for g, group in enumerate(groups):
        if len(group.samples) != settings.samples_per_prompt or len(group.prompt_ids) != settings.prompt_tokens:
            raise ValueError(
                f"group {g} has {len(group.samples)} samples to a prompt of {len(group.prompt_ids)} tokens; "
                f"{settings.samples_per_prompt} and {settings.prompt_tokens} are due"
            )
        for s, sample in enumerate(group.samples):
            count = len(sample.ids)
            if not 0 < count == len(sample.logprobs) <= width:
                raise ValueError(
                    f"sample {s} of group {g} has {count} tokens and {len(sample.logprobs)} log-probs; "
                    f"as many of each are due, 1 to {width}"
                )
            sequence = [*group.prompt_ids, *sample.ids][: settings.context]
            tokens[row, : len(sequence)] = torch.tensor(sequence)
            targets[row, :count] = torch.tensor(sample.ids)
            old[row, :count] = torch.tensor(sample.logprobs)
            mask[row, :count] = 1.0
            rewards[g, s] = sample.reward
            row += 1
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)).reshape(-1)
    return Batch(tokens, targets, old, mask, advantages, float(rewards.mean()))


def loss(model: Model, batch: Batch, settings: Settings) -> tuple[Tensor, Metrics]:
    """The clipped surrogate, summed over tokens and divided by rows, and its metrics (`grad_norm` not yet known: 0)."""
    logits = model(batch.tokens)[:, settings.prompt_tokens - 1 :]
    every = torch.log_softmax(logits, dim=-1)
    logprobs = every.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp((logprobs - batch.old) * batch.mask)
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    advantages = batch.advantages.unsqueeze(-1)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    value = -(gain * batch.mask).sum() / (batch.mask.shape[0] * settings.digits)
    with torch.no_grad():
        tokens = batch.mask.sum()
        entropy = -((every.exp() * every).sum(-1) * batch.mask).sum() / tokens
        outside = ((ratio != clipped) * batch.mask).sum() / tokens
        metrics = Metrics(
            reward=batch.reward,
            loss=float(value),
            entropy=float(entropy),
            ratio_mean=float((ratio * batch.mask).sum() / tokens),
            ratio_max=float((ratio * batch.mask).max()),
            clipped=float(outside),
            grad_norm=0.0,
        )
    return value, metrics


def optimizer(model: Model, settings: Settings) -> torch.optim.AdamW:
    """The trainer's optimizer. Its state is part of the trainer's snapshot."""
    return torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def train_step(model: Model, optim: torch.optim.Optimizer, groups: Sequence[Group], settings: Settings) -> Metrics:
    """One step on `prompts_per_step` groups: `updates_per_step` updates, each on an equal part of them, in order.

    A pure function of the weights, the optimizer's state and the groups, bit for bit, on one thread.

    Raises:
        ValueError: there are not `prompts_per_step` groups, or one does not fit the settings.
    """
    if len(groups) != settings.prompts_per_step:
        raise ValueError(f"a step takes {settings.prompts_per_step} groups, not {len(groups)}")
    part = settings.prompts_per_step // settings.updates_per_step
    seen: list[Metrics] = []
    for start in range(0, len(groups), part):
        value, metrics = loss(model, collate(groups[start : start + part], settings), settings)
        optim.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optim.step()
        seen.append(msgspec.structs.replace(metrics, grad_norm=float(norm)))
    return _summary(seen)


def _summary(parts: list[Metrics]) -> Metrics:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return Metrics(
        reward=mean([m.reward for m in parts]),
        loss=mean([m.loss for m in parts]),
        entropy=mean([m.entropy for m in parts]),
        ratio_mean=mean([m.ratio_mean for m in parts]),
        ratio_max=max(m.ratio_max for m in parts),
        clipped=mean([m.clipped for m in parts]),
        grad_norm=mean([m.grad_norm for m in parts]),
    )
