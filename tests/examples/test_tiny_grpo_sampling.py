"""Counter-based sampling, and answers that go on elsewhere bit for bit."""

from __future__ import annotations

import math
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tiny_grpo import task
from tiny_grpo.model import Model
from tiny_grpo.sampling import GroupDecoder, choose, uniforms
from tiny_grpo.settings import Settings

SETTINGS = Settings(seed=11)
Rows = list[list[tuple[int, bytes]]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> Model:
    """Weights as drawn, with a head that is far from even, so that answers end at different lengths."""
    made = Model(SETTINGS, seed=3)
    with torch.no_grad():
        made.head.weight.mul_(1.5)
    return made


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def collect(decoder: GroupDecoder, rows: Rows, budget: int = 1000) -> None:
    """Add what up to `budget` calls of advance report to `rows`."""
    for _ in range(budget):
        if decoder.done:
            return
        for sample, token, logprob in decoder.advance():
            rows[sample].append((token, bits(logprob)))


def whole(model: Model, index: int) -> Rows:
    rows: Rows = [[] for _ in range(SETTINGS.samples_per_prompt)]
    collect(GroupDecoder(model, SETTINGS, index, task.prompt(SETTINGS.seed, index)), rows)
    return rows


def test_answers_of_a_group_end_at_different_lengths(model: Model) -> None:
    lengths = {len(row) for index in range(8) for row in whole(model, index)}
    assert len(lengths) > 3


@pytest.mark.parametrize("index", range(40))
def test_any_cut_continues_bit_for_bit_in_tokens_and_log_probs(model: Model, index: int) -> None:
    draw = random.Random(index)
    expected = whole(model, index)
    kept = [row[: draw.randint(0, len(row))] for row in expected]
    if index % 3 == 0:  # all rows cut at one step, as a death between two journal writes leaves them
        step = draw.randint(0, SETTINGS.answer_tokens)
        kept = [row[:step] for row in expected]
    told = [len(k) == len(row) and draw.random() < 0.5 for k, row in zip(kept, expected, strict=True)]
    saved = [[token for token, _ in row] for row in kept]
    decoder = GroupDecoder(model, SETTINGS, index, task.prompt(SETTINGS.seed, index), saved=saved, finished=told)
    collect(decoder, kept)
    assert kept == expected


def test_an_answer_interrupted_again_and_again_is_the_same(model: Model) -> None:
    for index in range(5):
        expected = whole(model, index)
        rows: Rows = [[] for _ in expected]
        for _ in range(SETTINGS.answer_tokens):
            saved = [[token for token, _ in row] for row in rows]
            decoder = GroupDecoder(model, SETTINGS, index, task.prompt(SETTINGS.seed, index), saved=saved)
            collect(decoder, rows, budget=1)
        assert rows == expected


def test_another_process_continues_with_the_same_bits(model: Model, tmp_path: Path) -> None:
    expected = whole(model, 2)
    saved = [[token for token, _ in row[: 2 + s % 3]] for s, row in enumerate(expected)]
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    program = f"""
import torch
from tiny_grpo import task
from tiny_grpo.model import Model
from tiny_grpo.sampling import GroupDecoder
from tiny_grpo.settings import Settings
torch.set_num_threads(1)
settings = Settings(seed={SETTINGS.seed})
model = Model(settings, seed=99)
model.load_state_dict(torch.load({str(tmp_path / "weights.pt")!r}))
decoder = GroupDecoder(model, settings, 2, task.prompt(settings.seed, 2), saved={saved!r})
while not decoder.done:
    for sample, token, logprob in decoder.advance():
        print(sample, token, logprob.hex())
"""
    examples = Path(__file__).parents[2] / "examples"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=examples, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    tail: Rows = [[] for _ in expected]
    for line in done.stdout.splitlines():
        sample, token, logprob = line.split()
        tail[int(sample)].append((int(token), bits(float.fromhex(logprob))))
    assert tail == [row[2 + s % 3 :] for s, row in enumerate(expected)]


def test_what_was_saved_is_never_reported_again(model: Model) -> None:
    expected = whole(model, 4)
    saved = [[token for token, _ in row] for row in expected]
    saved[3] = saved[3][:-1]
    decoder = GroupDecoder(model, SETTINGS, 4, task.prompt(SETTINGS.seed, 4), saved=saved)
    assert [decoder.finished(sample) for sample in range(8)] == [sample != 3 for sample in range(8)]
    new = decoder.advance()
    assert [(sample, token, bits(logprob)) for sample, token, logprob in new] == [(3, *expected[3][-1])]
    assert decoder.done
    assert decoder.advance() == []


def test_a_group_saved_whole_is_done_without_a_step(model: Model) -> None:
    saved = [[token for token, _ in row] for row in whole(model, 5)]
    decoder = GroupDecoder(model, SETTINGS, 5, task.prompt(SETTINGS.seed, 5), saved=saved)
    assert decoder.done
    assert decoder.advance() == []


def test_saved_tokens_that_go_on_after_their_end_are_refused(model: Model) -> None:
    saved: list[list[int]] = [[] for _ in range(8)]
    saved[6] = [1, task.END, 2]
    with pytest.raises(ValueError, match="sample 6"):
        GroupDecoder(model, SETTINGS, 0, task.prompt(SETTINGS.seed, 0), saved=saved)
    with pytest.raises(ValueError, match="8 samples are due"):
        GroupDecoder(model, SETTINGS, 0, task.prompt(SETTINGS.seed, 0), saved=saved[:3])


def test_a_draw_depends_on_its_own_counters_only() -> None:
    table = uniforms(5, 17, samples=8, tokens=10)
    assert np.array_equal(uniforms(5, 17, samples=3, tokens=10), table[:3])
    assert np.array_equal(uniforms(5, 17, samples=8, tokens=4), table[:, :4])
    others = [uniforms(6, 17, 8, 10), uniforms(5, 18, 8, 10)]
    assert len(np.unique([table, *others])) == 3 * table.size
    assert ((table >= 0) & (table < 1)).all()


def test_draws_are_spread_evenly() -> None:
    values = np.concatenate([uniforms(0, index, 8, 10).ravel() for index in range(200)])
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert (abs(counts - values.size / 20) < 5 * math.sqrt(values.size / 20)).all()


def test_a_row_s_token_does_not_depend_on_other_rows() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(8, task.VOCAB)).astype(np.float32)
    uniform = generator.random(8)
    ids, logprobs = choose(logits, uniform)
    changed, changed_uniform = logits.copy(), uniform.copy()
    changed[1:] = generator.normal(size=(7, task.VOCAB))
    changed_uniform[1:] = generator.random(7)
    other_ids, other_logprobs = choose(changed, changed_uniform)
    assert ids[0] == other_ids[0]
    assert logprobs[0].tobytes() == other_logprobs[0].tobytes()


def test_tokens_come_with_the_frequency_and_log_prob_of_the_softmax() -> None:
    draws = 20_000
    logits = np.tile(np.linspace(-2, 1, task.VOCAB, dtype=np.float32), (draws, 1))
    ids, logprobs = choose(logits, (np.arange(draws) + 0.5) / draws)
    expected = torch.log_softmax(torch.from_numpy(logits[0]).double(), dim=0).numpy()
    assert np.allclose(np.bincount(ids, minlength=task.VOCAB) / draws, np.exp(expected), atol=1e-3)
    assert np.allclose(logprobs, expected[ids], atol=1e-6)


def test_a_step_at_a_time_gives_the_logits_of_the_whole_sequence(model: Model) -> None:
    tokens = torch.randint(0, task.VOCAB, (8, SETTINGS.context), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens)
    cache = model.cache(8)
    for position in range(SETTINGS.context):
        logits = model.step(tokens[:, position], position, cache)
        assert torch.allclose(logits, expected[:, position], atol=1e-4)
