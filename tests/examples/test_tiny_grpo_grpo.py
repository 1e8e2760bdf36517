"""The loss and the update: the same bits for the same inputs, and gradients where there is something to learn."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tiny_grpo import grpo, task, warmup
from tiny_grpo.grpo import Group, Sample
from tiny_grpo.model import Model
from tiny_grpo.sampling import GroupDecoder
from tiny_grpo.settings import Settings

SMALL = Settings(
    digits=4, width=64, layers=2, heads=4, prompts_per_step=16, lr=3e-4, warmup_reward=0.25, warmup_max_steps=400
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def generate(model: Model, settings: Settings, step: int) -> list[Group]:
    """The groups of one step, drawn from `model`."""
    groups = []
    for index in range(step * settings.prompts_per_step, (step + 1) * settings.prompts_per_step):
        prompt = task.prompt(settings.seed, index, settings.digits)
        decoder = GroupDecoder(model, settings, index, prompt)
        ids: list[list[int]] = [[] for _ in range(settings.samples_per_prompt)]
        logprobs: list[list[float]] = [[] for _ in ids]
        while not decoder.done:
            for sample, token, logprob in decoder.advance():
                ids[sample].append(token)
                logprobs[sample].append(logprob)
        samples = [Sample(i, p, task.reward(prompt, i)) for i, p in zip(ids, logprobs, strict=True)]
        groups.append(Group(prompt, samples))
    return groups


def with_rewards(groups: list[Group], rewards: list[float]) -> list[Group]:
    return [
        msgspec.structs.replace(
            group,
            samples=[msgspec.structs.replace(s, reward=r) for s, r in zip(group.samples, rewards, strict=True)],
        )
        for group in groups
    ]


def weights(model: Model) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SMALL, seed=1)


@pytest.fixture(scope="module")
def groups(model: Model) -> list[Group]:
    return with_rewards(generate(model, SMALL, 0), [1, 0, 0, 1, 0, 0, 0, 0.5])


def test_equal_inputs_give_equal_bits(model: Model, groups: list[Group]) -> None:
    ends = []
    for _ in range(2):
        trained = copy.deepcopy(model)
        optim = grpo.optimizer(trained, SMALL)
        seen = [grpo.train_step(trained, optim, groups, SMALL) for _ in range(3)]
        ends.append((weights(trained), seen))
    assert ends[0] == ends[1]
    assert ends[0][0] != weights(model)


def test_a_restored_optimizer_goes_on_with_the_same_bits(model: Model, groups: list[Group]) -> None:
    straight = copy.deepcopy(model)
    optim = grpo.optimizer(straight, SMALL)
    grpo.train_step(straight, optim, groups, SMALL)
    restored = Model(SMALL, seed=5)
    restored.load_state_dict(straight.state_dict())
    resumed = grpo.optimizer(restored, SMALL)
    resumed.load_state_dict(copy.deepcopy(optim.state_dict()))
    grpo.train_step(straight, optim, groups, SMALL)
    grpo.train_step(restored, resumed, groups, SMALL)
    assert weights(straight) == weights(restored)


def test_a_group_whose_rewards_are_equal_teaches_nothing(model: Model, groups: list[Group]) -> None:
    trained = copy.deepcopy(model)
    same = with_rewards(groups, [1.0] * 8)
    value, metrics = grpo.loss(trained, grpo.collate(same, SMALL), SMALL)
    value.backward()
    assert metrics.reward == 1.0
    assert all(p.grad is not None and not p.grad.any() for p in trained.parameters())


def test_fresh_samples_have_ratio_one(model: Model, groups: list[Group]) -> None:
    _, metrics = grpo.loss(model, grpo.collate(groups, SMALL), SMALL)
    assert metrics.ratio_mean == pytest.approx(1.0, abs=1e-4)
    assert metrics.ratio_max == pytest.approx(1.0, abs=1e-3)
    assert metrics.clipped == 0.0


def test_a_step_makes_the_better_answer_likelier(model: Model, groups: list[Group]) -> None:
    trained = copy.deepcopy(model)
    settings = msgspec.structs.replace(SMALL, updates_per_step=1)
    batch = grpo.collate(groups, settings)

    def gain() -> float:
        with torch.no_grad():
            logits = trained(batch.tokens)[:, settings.prompt_tokens - 1 :]
            logprobs = torch.log_softmax(logits, -1).gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
            return float(((logprobs * batch.mask).sum(1) * batch.advantages).sum())

    before = gain()
    grpo.train_step(trained, grpo.optimizer(trained, settings), groups, settings)
    assert gain() > before


@pytest.mark.parametrize(("reward_first", "shift"), [(1.0, 1.0), (0.0, -1.0)])
def test_a_token_beyond_the_clip_is_not_pushed_further(model: Model, reward_first: float, shift: float) -> None:
    """Stored log-probs far below (above) today's make a ratio beyond the clip of a good (bad) sample."""
    rewards = [reward_first] + [1.0 - reward_first] * 7
    group = with_rewards(generate(model, SMALL, 0)[:1], rewards)[0]
    samples = [
        msgspec.structs.replace(s, logprobs=[p - (shift if n == 0 else -shift) for p in s.logprobs])
        for n, s in enumerate(group.samples)
    ]
    trained = copy.deepcopy(model)
    value, metrics = grpo.loss(trained, grpo.collate([Group(group.prompt_ids, samples)], SMALL), SMALL)
    value.backward()
    assert metrics.clipped == 1.0
    assert all(p.grad is None or not p.grad.any() for p in trained.parameters())


def test_padding_has_no_say(model: Model, groups: list[Group]) -> None:
    batch = grpo.collate(groups, SMALL)
    value, _ = grpo.loss(model, batch, SMALL)
    rubbish = torch.where(batch.mask > 0, batch.targets, torch.full_like(batch.targets, 3))
    other, _ = grpo.loss(
        model, msgspec.structs.replace(batch, targets=rubbish, old=batch.old - (1 - batch.mask)), SMALL
    )
    assert value.item() == other.item()


def test_groups_that_do_not_fit_are_refused(model: Model, groups: list[Group]) -> None:
    optim = grpo.optimizer(model, SMALL)
    with pytest.raises(ValueError, match="16 groups"):
        grpo.train_step(model, optim, groups[:5], SMALL)
    short = Group(groups[0].prompt_ids, groups[0].samples[:4])
    with pytest.raises(ValueError, match="4 samples"):
        grpo.collate([short], SMALL)
    bare = Group(groups[0].prompt_ids, [Sample([1, 2], [-0.5], 0.0), *groups[0].samples[1:]])
    with pytest.raises(ValueError, match="2 tokens and 1 log-probs"):
        grpo.collate([bare], SMALL)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of heads"):
        Settings(width=100, heads=3)
    with pytest.raises(ValueError, match="updates_per_step"):
        Settings(prompts_per_step=10, updates_per_step=3)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("warm") / "deep" / "warm.pt"
    assert warmup.ensure(path, SMALL)
    return path


def test_the_warm_up_is_made_once_and_is_deterministic(warm: Path, tmp_path: Path) -> None:
    assert not warmup.ensure(warm, SMALL)
    warmup.ensure(tmp_path / "again.pt", SMALL)
    assert weights(warmup.load(warm, SMALL)) == weights(warmup.load(tmp_path / "again.pt", SMALL))
    assert [p.name for p in warm.parent.iterdir()] == ["warm.pt"]


def test_a_damaged_or_foreign_warm_up_file_is_not_loaded(warm: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(warm.read_bytes()[:1000])
    with pytest.raises(FileNotFoundError):
        warmup.load(damaged, SMALL)
    with pytest.raises(FileNotFoundError):
        warmup.load(warm, msgspec.structs.replace(SMALL, warmup_seed=2))
    assert warmup.load(warm, msgspec.structs.replace(SMALL, seed=9, lr=1.0)) is not None


def test_reward_rises_on_samples_one_version_old(warm: Path) -> None:
    trainer, rollout = warmup.load(warm, SMALL), warmup.load(warm, SMALL)
    optim = grpo.optimizer(trainer, SMALL)
    rewards = []
    for step in range(60):
        groups = generate(rollout, SMALL, step)
        rollout.load_state_dict(trainer.state_dict())  # the next batch is drawn from weights before this update
        rewards.append(grpo.train_step(trainer, optim, groups, SMALL).reward)
    assert sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.15, rewards
