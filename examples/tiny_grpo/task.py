"""The task: write the digits of the prompt in ascending order. Its reward is a rule, so every answer can be verified.

A prompt reads ``3 1 2 =`` and its right answer ``1 2 3 .``; each character is one token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ALPHABET = "0123456789=. "
VOCAB = len(ALPHABET)
ASK, END, PAD = 10, 11, 12

_PROMPTS = 1  # the Philox stream of prompts; sampling.py draws from another


def prompt(seed: int, index: int, digits: int = 8) -> list[int]:
    """The token ids of prompt `index` of the endless list that `seed` names: ``[digits + 1]``.

    A pure function of its arguments.
    """
    stream = np.random.Philox(key=[seed % 2**64, index % 2**64], counter=[0, 0, 0, _PROMPTS])
    return [int(raw % np.uint64(10)) for raw in stream.random_raw(digits)] + [ASK]


def answer(prompt_ids: Sequence[int]) -> list[int]:
    """The one right answer to a prompt."""
    return [*sorted(prompt_ids[:-1]), END]


def reward(prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> float:
    """1.0 for the right answer, else 0.0. An answer that was cut off before its end token is wrong."""
    return float(list(answer_ids) == answer(prompt_ids))


def text(ids: Sequence[int]) -> str:
    """Token ids as people read them."""
    return "".join(ALPHABET[token] for token in ids)
