"""A rollout for tests: ``python ledger_worker.py RUN_DIR IDENTITY FAULT GROUP SAMPLE``.

Works on several groups at once until the end. FAULT befalls one sample: ``lose`` loses its first result on the way to
the ledger, ``hang`` lets it never come to an end, whoever works on it; ``none``.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from robustrl.persist import END, LeaseGrant, LedgerClient
from robustrl.roles import Identity
from robustrl.wire import Address, RpcClient, Secret

TOKENS = 12


async def answer(ledger: LedgerClient, grant: LeaseGrant, fault: str, place: tuple[int, int]) -> None:
    writer = ledger.writer(grant)
    for sample in grant.samples:
        if sample.finished:
            continue
        struck = (grant.group, sample.sample) == place
        if struck and fault == "hang":
            continue
        for position in range(sample.tokens, TOKENS):
            await asyncio.to_thread(writer.append, sample.sample, position, -1.0, "1.0")
        if not (struck and fault == "lose" and grant.attempt == 1):
            writer.finish(sample.sample, 1.0, "length")


async def work(folder: Path, me: Identity, fault: str, place: tuple[int, int]) -> None:
    rpc = RpcClient(
        lambda: Address.parse((folder / "address").read_text()), me, Secret.read(folder / "secret"), patience_s=60
    )
    async with LedgerClient(rpc.call, flush_s=0.005) as ledger:
        while (grant := await ledger.lease([0], wait_s=0.5)) is not END:
            if isinstance(grant, LeaseGrant):
                await answer(ledger, grant, fault, place)
    await rpc.close()


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), Identity.parse(sys.argv[2]), sys.argv[3], (int(sys.argv[4]), int(sys.argv[5]))))
