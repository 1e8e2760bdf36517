"""The way in: verl imports this in every process (entry point ``verl.plugins``, or VERL_USE_EXTERNAL_MODULES).

Without `robustrl run` in the environment it does nothing. With it, it registers what is to be patched once verl's own
modules are imported; it imports none of them itself.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from robustrl.attach import Session, after_import, assert_applied, extend, wrap
from robustrl.attach.patches import Wrapper
from robustrl.errors import AttachError, ConfigError

MAIN: Final = "verl.experimental.fully_async_policy.fully_async_main"
ENGINE: Final = "actor_rollout_ref.rollout.checkpoint_engine"
OURS: Final = {f"{ENGINE}.backend": "robustrl", f"{ENGINE}.custom_backend_module": "robustrl_verl.engine"}

_FULLY_ASYNC: Final = "verl.experimental.fully_async_policy"
_GENERATE: Final = (
    "self, request_id, *, prompt_ids, sampling_params, image_data=None, video_data=None, audio_data=None, "
    "mm_processor_kwargs=None, **kwargs"
)

SEAMS: Final[dict[str, tuple[tuple[str, str, str], ...]]] = {
    f"{_FULLY_ASYNC}.fully_async_main": (
        ("FullyAsyncTaskRunner._initialize_components", "self, config", "robustrl_verl.trainer:attach"),
        ("FullyAsyncTaskRunner._run_training_loop", "self", "robustrl_verl.trainer:run"),
    ),
    f"{_FULLY_ASYNC}.fully_async_trainer": (
        ("FullyAsyncTrainer._get_samples_from_queue", "self", "robustrl_verl.journal:begin_batch"),
        ("FullyAsyncTrainer._fit_save_checkpoint", "self, force=False", "robustrl_verl.journal:commit_batches"),
    ),
    f"{_FULLY_ASYNC}.message_queue": (
        ("MessageQueue.get_sample", "self", "robustrl_verl.journal:get_sample"),
        ("MessageQueueClient.put_sample", "self, sample", "robustrl_verl.samples:put_sample"),
    ),
    f"{_FULLY_ASYNC}.fully_async_rollouter": (
        ("FullyAsyncRollouter._init_async_rollout_manager", "self", "robustrl_verl.fleet:watch_replicas"),
        (
            "FullyAsyncRollouter._process_single_sample_streaming",
            "self, rollout_sample",
            "robustrl_verl.samples:process_sample",
        ),
        ("FullyAsyncRollouter._feed_samples", "self", "robustrl_verl.samples:noticed"),
        ("FullyAsyncRollouter._processor_worker", "self", "robustrl_verl.samples:noticed"),
        ("FullyAsyncRollouter.reset_staleness", "self", "robustrl_verl.fleet:reset_staleness"),
        ("FullyAsyncRollouter.fit", "self", "robustrl_verl.samples:fit"),
    ),
    "verl.checkpoint_engine.base": (
        ("CheckpointEngineManager.update_weights", "self, global_steps=None", "robustrl_verl.sync:update_weights"),
    ),
    "verl.workers.rollout.llm_server": (
        ("LLMServerClient._acquire_server", "self, request_id, **extra", "robustrl_verl.requests:acquire_server"),
        ("LLMServerClient.generate", _GENERATE, "robustrl_verl.requests:generate"),
    ),
}
"""By module of verl: what is wrapped, its parameters in the versions that we know, and by what."""


def targets(*modules: str) -> list[str]:
    """The names of the patches of these modules (default: all), as `robustrl.attach.applied` gives them."""
    return [f"{module}:{path}" for module in modules or SEAMS for path, _, _ in SEAMS[module]]


def environment() -> dict[str, str]:
    """Loads this module in every process that imports verl. Unlike with an entry point, verl says when that fails."""
    others = os.environ.get("VERL_USE_EXTERNAL_MODULES", "")
    wanted = [name for name in others.split(",") if name and name != __name__]
    return {"VERL_USE_EXTERNAL_MODULES": ",".join([*wanted, __name__])}


def install() -> None:
    """Registers all patches."""
    for module in SEAMS:
        after_import(module, _patch)
    after_import("verl.workers.rollout.vllm_rollout.vllm_async_server", _add_probe)


def entry(module: str, argv: Sequence[str]) -> Callable[[], object]:
    """See `robustrl.attach.Adapter`. Imports verl.

    Raises AttachError for an entry point that is not supported, and ConfigError for a setting that contradicts ours.
    """
    if module != MAIN:
        raise AttachError(
            f"{module} cannot be run attached", why=f"of verl's trainers only {MAIN} is supported so far", do=_ALONE
        )
    # Hooks and hydra's relative config both need the module under its own name, not as __main__.
    found = importlib.import_module(module)
    assert_applied(targets(module))
    extra = [] if any(word.startswith("--config-path") for word in argv) else [f"--config-path={_configs(found)}"]
    sys.argv = [str(found.__file__), *extra, *with_engine(argv)]
    run: Callable[[], object] = found.main
    return run


_ALONE: Final = (
    "The checkpoint engine works without `robustrl run`: set "
    + " ".join(f"{name}={value}" for name, value in OURS.items())
    + "."
)


def with_engine(argv: Sequence[str]) -> list[str]:
    """The command line with our checkpoint engine chosen. Raises ConfigError where it names another."""
    said = dict(word.lstrip("+").partition("=")[::2] for word in argv if "=" in word)
    for name, value in OURS.items():
        if said.get(name, value) != value:
            raise ConfigError(
                f"{name} is {said[name]}, and robustrl needs {value}",
                why="with another engine the death of one replica ends the synchronisation of all",
                do="Leave the setting out, or run with robustrl.enable=false.",
            )
    return [*argv, *(f"{name}={value}" for name, value in OURS.items() if name not in said)]


def _configs(module: ModuleType) -> Path:
    return Path(str(module.__file__)).parent / "config"


def _patch(module: ModuleType) -> None:
    for path, expect, ours in SEAMS[module.__name__]:
        wrap(module, path, _load(ours), expect=expect)


def _add_probe(module: ModuleType) -> None:
    from robustrl_verl.fleet import PROBE, probe

    extend(module, f"vLLMHttpServer.{PROBE}", probe)


def _load(name: str) -> Wrapper:
    module, _, function = name.partition(":")
    found: Wrapper = getattr(importlib.import_module(module), function)
    return found


if Session.current() is not None:
    install()
