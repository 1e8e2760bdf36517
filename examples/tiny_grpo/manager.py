"""The manager: the prompt source, and the server of the ledger. It needs no torch."""

from __future__ import annotations

import os

import msgspec

import robustrl
from tiny_grpo.settings import Settings
from tiny_grpo.task import prompt


def run() -> None:
    settings = msgspec.json.decode(os.environ["TINY_GRPO_SETTINGS"], type=Settings)
    with robustrl.guard(role="manager") as me:
        me.serve_ledger(
            lambda index: prompt(settings.seed, index, settings.digits),
            groups_per_batch=settings.prompts_per_step,
            samples_per_prompt=settings.samples_per_prompt,
            total_steps=settings.steps,
        )


if __name__ == "__main__":
    run()
