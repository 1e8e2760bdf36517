"""The sizes, rates and seeds of the reference job, in one frozen value that every process of the job is given."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What defines one job. Two jobs with equal settings (and the same warm-up file) are the same job.

    The defaults are sized for two CPU cores: one step's generation and training together take about 0.6 s of
    one core.
    """

    seed: int = 0
    """Names the job's prompts and samples; with the prompt, sample and token index it decides every draw."""

    # the task: sort this many digits
    digits: int = 8
    spare_tokens: int = 1
    """How many tokens an answer may run over the right length, which is `digits` and an end token."""

    # the model
    width: int = 208
    layers: int = 2
    heads: int = 4

    # one step of GRPO
    steps: int = 40
    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    updates_per_step: int = 2
    """The batch of a step is cut into this many equal parts, in order, with one optimizer update each."""
    lr: float = 1e-4
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_grad_norm: float = 1.0

    # the supervised warm-up that stands for pre-training
    warmup_seed: int = 1
    warmup_batch: int = 64
    warmup_lr: float = 1e-3
    warmup_slips: float = 0.06
    """The share of digits that are wrong in the texts to learn from. The model learns to slip as they do, and
    reinforcement learning takes that away again."""
    warmup_reward: float = 0.3
    """The warm-up ends when the expected reward of a sampled answer is this high, ..."""
    warmup_max_steps: int = 200
    """... or after this many updates."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.prompts_per_step % self.updates_per_step:
            raise ValueError(
                f"prompts_per_step {self.prompts_per_step} does not divide into {self.updates_per_step} updates "
                "(updates_per_step)"
            )
        if self.samples_per_prompt < 2:
            raise ValueError("samples_per_prompt must be at least 2: an advantage is measured against the group")

    @property
    def prompt_tokens(self) -> int:
        """The length of every prompt: the digits and the token that asks for the answer."""
        return self.digits + 1

    @property
    def answer_tokens(self) -> int:
        """The most tokens that an answer may have, its end token included."""
        return self.digits + 1 + self.spare_tokens

    @property
    def context(self) -> int:
        """The most tokens that the model ever reads: the last token of an answer is never fed back."""
        return self.prompt_tokens + self.answer_tokens - 1
