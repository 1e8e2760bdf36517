"""The supervised warm-up. Post-training starts from a trained model; this makes one, once, and keeps it in a file.

It stops early on purpose, at a reward that leaves reinforcement learning room to rise.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from tiny_grpo import task
from tiny_grpo.model import Model
from tiny_grpo.settings import Settings

_SHAPING = ("digits", "spare_tokens", "width", "layers", "heads")
_FORMAT = 1  # raise it when a change to the code would train another model from the same settings


def ensure(path: Path, settings: Settings) -> bool:
    """Make the warm-up weights at `path` unless they are there. Returns whether they were made now.

    A file made for other settings is replaced. The write is atomic, so that processes that start together see a whole
    file or none; at worst each makes the same one. Making it takes some seconds of one core.

    Raises:
        OSError: `path` cannot be written.
    """
    if _read(path, settings) is not None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    state = train(settings).state_dict()
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save({"fingerprint": _fingerprint(settings), "state": state}, file)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    return True


def load(path: Path, settings: Settings) -> Model:
    """The warmed-up model. Raises FileNotFoundError if `path` holds none for these settings: call `ensure` first."""
    state = _read(path, settings)
    if state is None:
        raise FileNotFoundError(f"{path} holds no warm-up weights for these settings")
    model = Model(settings)
    model.load_state_dict(state)
    return model


def train(settings: Settings) -> Model:
    """Train from scratch on right answers until sampled answers would earn `warmup_reward` on average.

    Deterministic on one machine: seeded, one thread (the process's setting is put back afterwards).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(settings)
    finally:
        torch.set_num_threads(threads)


def _train(settings: Settings) -> Model:
    model = Model(settings, settings.warmup_seed)
    optim = torch.optim.AdamW(
        model.parameters(), lr=settings.warmup_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    generator = torch.Generator().manual_seed(settings.warmup_seed)
    expected = 0.0
    for step in range(settings.warmup_max_steps):
        for group in optim.param_groups:
            group["lr"] = settings.warmup_lr * min(1.0, (step + 1) / 20)
        tokens, targets, right = _batch(settings, generator)
        logits = model(tokens)[:, settings.prompt_tokens - 1 :]
        nll = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        # A sample is right with the probability of the right answer, so the reward needs no sampling to be known.
        chances = torch.exp(-nll.detach().sum(dim=1))[right]
        if len(chances):
            expected += 0.1 * (float(chances.mean()) - expected)
        if expected >= settings.warmup_reward:
            break
        optim.zero_grad(set_to_none=True)
        nll.mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
    return model


def _batch(settings: Settings, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts with mostly right answers, whose digits are at times replaced by others.

    Returns tokens ``[batch, prompt + digits]``, targets ``[batch, digits + 1]`` and which rows are right, ``[batch]``.
    """
    shape = (settings.warmup_batch, settings.digits)
    digits = torch.randint(0, 10, shape, generator=generator)
    ordered = digits.sort(dim=1).values
    slips = torch.rand(shape, generator=generator) < settings.warmup_slips
    written = torch.where(slips, torch.randint(0, 10, shape, generator=generator), ordered)
    ask = torch.full((settings.warmup_batch, 1), task.ASK)
    end = torch.full((settings.warmup_batch, 1), task.END)
    right = (written == ordered).all(dim=1)
    return torch.cat([digits, ask, written], dim=1), torch.cat([written, end], dim=1), right


def _fingerprint(settings: Settings) -> str:
    fields = {
        name: getattr(settings, name)
        for name in settings.__struct_fields__
        if name in _SHAPING or name.startswith("warmup_")
    }
    return msgspec.json.encode({"format": _FORMAT, **fields}, order="sorted").decode()


def _read(path: Path, settings: Settings) -> dict[str, Tensor] | None:
    """The weights at `path`, or None if there are none, none that can be read, or others."""
    try:
        content = torch.load(path, weights_only=True)
        if content["fingerprint"] != _fingerprint(settings):
            return None
        state: dict[str, Tensor] = content["state"]
    except Exception:  # torch.load has no common error for a damaged file; whatever is wrong, the file is made anew
        return None
    return state
