"""The rollout backend ``light``: a small transformers model behind verl's own replica interface, token by token.

Its server behaves as verl's vLLM server does: aborting closes a gate, ends what runs with the tokens it has got, and
parks what comes until generation is resumed (or turns it away, where the caller says so). Weights come in whole.

Environment: ``LIGHT_TOKEN_S``, seconds that each token takes at least (0): requests that last can be met by a kill.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from verl_on_cpu.record import digest_of, tell

NAME = "light_server_{rank}_0{suffix}"


class LightServer:
    """The engine and its front in one actor: one process, so that it dies whole."""

    def __init__(self, config: Any, model_path: str, rank: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.config, self.rank = config, rank
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.random = torch.Generator().manual_seed(rank)
        self.token_s = float(os.environ.get("LIGHT_TOKEN_S", "0"))
        self.version: int | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.rejecting = False
        self.running: set[str] = set()
        self.idle = asyncio.Event()
        self.aborted: set[str] = set()
        tell("serving", rank=rank)

    def address(self) -> str:
        """Names this life of the server; nothing listens there."""
        return f"light-{self.rank}-{os.getpid()}:0"

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        """verl's contract: `stop_reason` is "completed", or "aborted" with what there is so far."""
        while not self.open.is_set():
            if self.rejecting:
                return self._output([], [], "aborted")
            await self.open.wait()
        self.running.add(request_id)
        self.idle.clear()
        try:
            return await self._generate(list(prompt_ids), sampling_params, request_id)
        finally:
            self.running.discard(request_id)
            self.aborted.discard(request_id)
            if not self.running:
                self.idle.set()

    async def _generate(self, prompt: list[int], sampling: dict[str, Any], request_id: str) -> TokenOutput:
        asked = sampling.get("max_tokens") or sampling.get("max_new_tokens") or self.config.response_length
        room = self.config.max_model_len - len(prompt)
        if room < 1:
            raise ValueError(f"the prompt of {len(prompt)} tokens leaves no room to generate")
        ids: list[int] = []
        log_probs: list[float] = []
        cache = None
        given = torch.tensor([prompt])
        while len(ids) < min(asked, room):
            if request_id in self.aborted:
                return self._output(ids, log_probs, "aborted")
            with torch.inference_mode():
                out = self.model(given, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            chances = self._chances(out.logits[0, -1], sampling)
            token = int(torch.multinomial(chances.exp(), 1, generator=self.random))
            ids.append(token)
            log_probs.append(float(chances[token]))
            given = torch.tensor([[token]])
            await asyncio.sleep(self.token_s)
            if token == self.model.config.eos_token_id and not sampling.get("ignore_eos"):
                break
        return self._output(ids, log_probs, "completed")

    @staticmethod
    def _chances(logits: torch.Tensor, sampling: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities; temperature 0 leaves only the likeliest."""
        temperature = sampling.get("temperature", 1.0)
        if temperature == 0:
            return torch.full_like(logits, -torch.inf).index_fill(0, logits.argmax(), 0.0)
        return torch.log_softmax(logits.float() / temperature, -1)

    def _output(self, ids: list[int], log_probs: list[float], reason: str) -> TokenOutput:
        return TokenOutput(
            token_ids=ids, log_probs=log_probs, stop_reason=reason, extra_fields={"global_steps": self.version}
        )

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        self.rejecting = reject_request
        self.open.clear()
        ids = sorted(self.running)
        self.aborted.update(ids)
        await self.wait_for_requests_to_drain()
        return {"aborted_count": len(ids), "request_ids": ids}

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        if request_id not in self.running:
            return {"aborted": False, "error": f"Request {request_id} not found"}
        self.aborted.add(request_id)
        return {"aborted": True, "request_id": request_id}

    async def resume_generation(self) -> None:
        self.rejecting = False
        self.open.set()

    async def wait_for_requests_to_drain(self) -> None:
        if self.running:
            await self.idle.wait()

    async def load(self, tensors: list[tuple[str, torch.Tensor]], version: int | None) -> None:
        """Takes a whole version. Raises ValueError, and keeps what it has, for one that is not the model's."""
        mine = dict(self.model.named_parameters())
        if {name for name, _ in tensors} != mine.keys():
            raise ValueError(f"these are not the weights of {type(self.model).__name__}")
        with torch.no_grad():
            for name, tensor in tensors:
                mine[name].copy_(tensor)
        self.version = version
        tell("loaded", rank=self.rank, version=version, digest=digest_of(mine.items()))

    async def set_global_steps(self, global_steps: int) -> None:
        self.version = global_steps

    async def weights(self) -> dict[str, Any]:
        """What is held now: ``{"version": ..., "digest": ...}``."""
        return {"version": self.version, "digest": digest_of(self.model.named_parameters())}

    # There is no cache, no memory to give back and no profiler.
    async def wake_up(self, tags: list[str] | None = None) -> None: ...

    async def sleep(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def start_profile(self, **_: Any) -> None: ...

    async def stop_profile(self) -> None: ...


class LightReplica(RolloutReplica):
    """One server for a replica, whatever its parallel sizes."""

    async def launch_servers(self) -> None:
        server = (
            ray.remote(LightServer)
            .options(
                name=NAME.format(rank=self.replica_rank, suffix=self.name_suffix),
                num_cpus=0,
                max_concurrency=self.max_concurrency,
            )
            .remote(self.config, self.model_config.path, self.replica_rank)
        )
        self._server_address = await server.address.remote()
        self._server_handle = server
        self.servers = [server]


class LightAdapter(BaseRollout):
    """In the CheckpointEngineWorker: hands a version to the replica's server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank if replica_rank >= 0 else int(os.environ["RANK"])
        self.is_leader_rank = True

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: int | None = None, **_: Any
    ) -> None:
        tensors = [(name, tensor.detach().cpu().clone()) async for name, tensor in ensure_async_iterator(weights)]
        server = ray.get_actor(NAME.format(rank=self.replica_rank, suffix=""))
        await server.load.remote(tensors, global_steps)

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...
