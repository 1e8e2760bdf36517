"""Sampling that another process can continue: every draw is a function of counters, never of a generator's history.

Token i of a sample depends only on (seed, prompt index, sample index, i) and on the logits. The logits in turn are made
by the same fixed-shape steps in the same order, so a `GroupDecoder` that is given the tokens saved so far arrives at
the bits of the one that was interrupted, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tiny_grpo.model import Model
from tiny_grpo.settings import Settings
from tiny_grpo.task import END, PAD, VOCAB

NewToken: TypeAlias = tuple[int, int, float]
"""(sample index, token id, log-prob of the token under the distribution that it was drawn from)."""

_SAMPLES = 2  # the Philox stream of samples; task.py draws its prompts from another


def uniforms(seed: int, prompt_index: int, samples: int, tokens: int) -> npt.NDArray[np.float64]:
    """The numbers in [0, 1) that decide the tokens of one prompt's samples. Shape ``[samples, tokens]``.

    Entry [s, i] is a function of (seed, prompt index, s, i) alone: a larger table starts with the smaller one.
    """
    key = [seed % 2**64, prompt_index % 2**64]
    raw = [np.random.Philox(key=key, counter=[0, 0, s, _SAMPLES]).random_raw(tokens) for s in range(samples)]
    return (np.stack(raw) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choose(
    logits: npt.NDArray[np.float32], uniform: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Draw one token per row from softmax(logits) by inverting its cumulative distribution.

    ``[rows, vocab]`` and ``[rows]`` to ids ``[rows]`` and their log-probs ``[rows]``. The log-probs are rounded to
    float32 once, here, so that a store that keeps 32 bits gives back the same number.
    """
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    mass = np.exp(shifted).cumsum(axis=1)
    total = mass[:, -1]
    ids = np.minimum((mass <= (uniform * total)[:, None]).sum(axis=1), logits.shape[1] - 1)
    return ids, (shifted[np.arange(len(ids)), ids] - np.log(total)).astype(np.float32)


class GroupDecoder:
    """Generates the samples of one prompt together, from the start or from what was saved of them.

    All rows step in lockstep, one row a sample. A row with saved tokens is fed those and draws nothing until they are
    used up, while other rows may already draw; a row that has ended is fed padding. So step t of every continuation has
    the very inputs of step t of the uninterrupted run. The weights must not change underneath, and torch must run on
    one thread (`torch.set_num_threads(1)`) in both processes.

    Args:
        model: the policy; only `Model.step` is used.
        settings: the job's settings.
        prompt_index: the index that the prompt was made from; names the draws.
        prompt_ids: the prompt, ``[settings.prompt_tokens]``.
        saved: for each sample the token ids saved so far; None for none.
        finished: for each sample whether it had ended. A sample whose saved tokens end it has ended in any case.

    Raises:
        ValueError: the shapes do not fit the settings, or saved tokens go on after their end.
    """

    def __init__(
        self,
        model: Model,
        settings: Settings,
        prompt_index: int,
        prompt_ids: Sequence[int],
        saved: Sequence[Sequence[int]] | None = None,
        finished: Sequence[bool] | None = None,
    ) -> None:
        rows = settings.samples_per_prompt
        self._model = model
        self._settings = settings
        self._prompt = list(prompt_ids)
        self._saved = [list(ids) for ids in saved] if saved is not None else [[] for _ in range(rows)]
        ended = list(finished) if finished is not None else [False] * rows
        self._check(ended)
        self._ended = [end or self._ends(ids) for ids, end in zip(self._saved, ended, strict=True)]
        self._uniforms = uniforms(settings.seed, prompt_index, rows, settings.answer_tokens)
        self._cache = model.cache(rows)
        self._next = 0  # the index of the answer token that the next step decides
        self._feed = np.full(rows, self._prompt[-1], dtype=np.int64)

    def _check(self, finished: list[bool]) -> None:
        settings = self._settings
        if len(self._prompt) != settings.prompt_tokens:
            raise ValueError(f"a prompt has {settings.prompt_tokens} tokens, not {len(self._prompt)}")
        if not len(self._saved) == len(finished) == settings.samples_per_prompt:
            raise ValueError(
                f"{settings.samples_per_prompt} samples are due: saved has {len(self._saved)}, finished {len(finished)}"
            )
        for sample, ids in enumerate(self._saved):
            if len(ids) > settings.answer_tokens or END in ids[:-1] or not all(0 <= t < VOCAB for t in ids):
                raise ValueError(f"the saved tokens of sample {sample} are no beginning of an answer: {ids}")

    def _ends(self, ids: list[int]) -> bool:
        return len(ids) == self._settings.answer_tokens or (bool(ids) and ids[-1] == END)

    @property
    def done(self) -> bool:
        """Whether every sample has ended."""
        return all(self._ended)

    def finished(self, sample: int) -> bool:
        """Whether this sample has ended: with its end token or at the most tokens that an answer may have."""
        return self._ended[sample]

    def advance(self) -> list[NewToken]:
        """Step until some sample gets a new token; the new tokens in order of sample. Empty only when `done`.

        Saved tokens are replayed silently on the way: they are neither drawn again nor returned.
        """
        new: list[NewToken] = []
        while not new and not self.done:
            if self._next == 0:
                self._read_prompt()
            new = self._decide()
        return new

    def _read_prompt(self) -> None:
        for position, token in enumerate(self._prompt[:-1]):
            self._model.step(torch.full((len(self._saved),), token), position, self._cache)

    def _decide(self) -> list[NewToken]:
        """One step: decide token `_next` of every sample, from what was saved or by a draw."""
        i = self._next
        logits = self._model.step(torch.from_numpy(self._feed), len(self._prompt) - 1 + i, self._cache)
        ids, logprobs = choose(logits.numpy(), self._uniforms[:, i])
        new: list[NewToken] = []
        feed = np.full(len(ids), PAD, dtype=np.int64)
        for sample, saved in enumerate(self._saved):
            if i < len(saved):
                feed[sample] = saved[i]
            elif not self._ended[sample]:
                token = int(ids[sample])
                feed[sample] = token
                new.append((sample, token, float(logprobs[sample])))
                self._ended[sample] = token == END or i + 1 == self._settings.answer_tokens
        self._feed = feed
        self._next = i + 1
        return new
