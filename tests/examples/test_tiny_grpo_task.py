"""The task: an endless list of prompts that is a pure function, and a reward that is a rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiny_grpo import task

SEEDS = st.integers(0, 2**63)
INDICES = st.integers(0, 2**40)


@given(SEEDS, INDICES)
def test_a_prompt_is_a_pure_function_of_seed_and_index(seed: int, index: int) -> None:
    first = task.prompt(seed, index)
    task.prompt(seed, index + 1)
    assert task.prompt(seed, index) == first
    assert len(first) == 9
    assert first[-1] == task.ASK
    assert all(0 <= digit <= 9 for digit in first[:-1])


def test_prompts_of_other_indices_and_seeds_differ() -> None:
    prompts = {tuple(task.prompt(seed, index)) for seed in range(3) for index in range(200)}
    assert len(prompts) == 600


def test_prompts_use_every_digit_about_equally() -> None:
    digits = [digit for index in range(1000) for digit in task.prompt(7, index)[:-1]]
    assert all(600 < digits.count(digit) < 1000 for digit in range(10))


@given(SEEDS, INDICES)
def test_the_right_answer_earns_one_and_any_change_of_it_nothing(seed: int, index: int) -> None:
    prompt = task.prompt(seed, index)
    right = task.answer(prompt)
    assert task.reward(prompt, right) == 1.0
    for place in range(len(right)):
        wrong = [*right[:place], (right[place] + 1) % task.VOCAB, *right[place + 1 :]]
        assert task.reward(prompt, wrong) == 0.0


@pytest.mark.parametrize("answer", ["", "12359", "12359.", "1 2 3", "9532.", "12358..", "12358. "])
def test_an_answer_cut_off_or_gone_on_is_wrong(answer: str) -> None:
    prompt = [task.ALPHABET.index(char) for char in "85321="]
    ids = [task.ALPHABET.index(char) for char in answer]
    assert task.text(task.answer(prompt)) == "12358."
    assert task.reward(prompt, ids) == 0.0
