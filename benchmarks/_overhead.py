"""The reference model generates with the ledger and without it, in the same process, taking turns."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _actors import Actor
from _journals import SECRET, LedgerHost

from robustrl.persist import LeaseGrant, LedgerClient
from robustrl.roles import Identity, Member
from robustrl.wire import Address, RpcClient

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


class Generator:
    """A rollout of the reference job whose answers go to the ledger, or only to a list."""

    def __init__(self, address: tuple[str, int]) -> None:
        sys.path.insert(0, str(EXAMPLES))
        import torch

        from tiny_grpo.model import Model
        from tiny_grpo.settings import Settings

        torch.set_num_threads(1)
        self.settings = Settings()
        self.model = Model(self.settings)
        self.ledger = LedgerClient(RpcClient(lambda: Address(*address), Identity(Member("rollout"), 1), SECRET).call)
        self.prompts = 0

    async def start(self) -> None:
        await self.ledger.start()

    async def turn(self, tokens: int, kept: bool) -> float:
        """Generates so many tokens, prompt after prompt, and returns how many a second."""
        began = time.monotonic()
        made = 0
        while made < tokens:
            writer = None
            if kept:
                grant = await self.ledger.lease([1 << 20])
                assert isinstance(grant, LeaseGrant)
                writer = self.ledger.writer(grant)
            self.prompts += 1
            made += await asyncio.to_thread(self._answer, self.prompts, writer)
        return made / (time.monotonic() - began)

    def _answer(self, index: int, writer: Any) -> int:
        import torch

        from tiny_grpo.sampling import GroupDecoder
        from tiny_grpo.task import prompt

        made = 0
        answers: list[list[int]] = [[] for _ in range(self.settings.samples_per_prompt)]
        with torch.inference_mode():
            decoder = GroupDecoder(self.model, self.settings, index, prompt(0, index))
            while not decoder.done:
                for sample, token, logprob in decoder.advance():
                    answers[sample].append(token)
                    made += 1
                    if writer is not None:
                        writer.append(sample, token, logprob, "1.0")
        if writer is not None:
            for sample in range(self.settings.samples_per_prompt):
                writer.finish(sample, 1.0)
        return made


def rollout_rates(tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Rows with the rate of each turn, and one with what the ledger costs: 1 - the median of (with / without)."""
    folder = Path(tempfile.mkdtemp(prefix="rrbench-"))
    host = Actor(LedgerHost)
    rows: list[dict[str, Any]] = []
    try:
        address = host.ask("start", path=str(folder / "ledger.db"), samples=8)
        generator = Actor(Generator, address)
        try:
            generator.ask("start")
            for kept in (True, False):
                generator.ask("turn", tokens=tokens // 4, kept=kept)
            ratios = []
            for pair in range(4 * rounds):
                order = (True, False) if pair % 2 else (False, True)
                rates = {kept: generator.ask("turn", tokens=tokens, kept=kept) for kept in order}
                ratios.append(rates[True] / rates[False])
                rows.append(
                    {"kind": "rollout", "pair": pair, "with": round(rates[True]), "without": round(rates[False])}
                )
            ratios.sort()
            middle = (ratios[(len(ratios) - 1) // 2] + ratios[len(ratios) // 2]) / 2
            rows.append({"kind": "overhead", "slowdown": round(1 - middle, 4), "pairs": len(ratios)})
        finally:
            generator.close()
    finally:
        host.close()
        shutil.rmtree(folder)
    return rows
