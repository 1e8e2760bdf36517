"""A rollout for tests: ``python ledger_writer.py RUN_DIR IDENTITY LENGTH``.

Leases groups until the end and appends LENGTH tokens to each sample from a plain thread. After each flush it writes
one line ``group sample tokens`` per sample to ``RUN_DIR/acked-MEMBER``: what the ledger has acknowledged.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from robustrl.persist import END, LeaseGrant, LeaseWriter, LedgerClient
from robustrl.roles import Identity
from robustrl.wire import Address, RpcClient, Secret


def token(group: int, sample: int, position: int) -> int:
    return group * 1_000_000 + sample * 10_000 + position


def generate(writer: LeaseWriter, grant: LeaseGrant, start: int, end: int) -> None:
    for position in range(start, end):
        for sample in grant.samples:
            if position >= sample.tokens and not sample.finished:
                writer.append(sample.sample, token(grant.group, sample.sample, position), -float(position), "1.0")


async def work(folder: Path, me: Identity, length: int) -> None:
    rpc = RpcClient(
        lambda: Address.parse((folder / "address").read_text()), me, Secret.read(folder / "secret"), patience_s=60
    )
    with (folder / f"acked-{me.member.index}").open("a") as acked:
        async with LedgerClient(rpc.call, flush_s=0.005) as ledger:
            while (grant := await ledger.lease([0], wait_s=1.0)) is not END:
                if not isinstance(grant, LeaseGrant):
                    continue
                writer = ledger.writer(grant)
                for start in range(0, length, 10):
                    await asyncio.to_thread(generate, writer, grant, start, start + 10)
                    await ledger.flush()
                    for sample in grant.samples:
                        acked.write(f"{grant.group} {sample.sample} {writer.tokens(sample.sample)}\n")
                    acked.flush()
                for sample in grant.samples:
                    if not sample.finished:
                        writer.finish(sample.sample, float(grant.group % 2), "length")
                await ledger.flush()
    await rpc.close()


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), Identity.parse(sys.argv[2]), int(sys.argv[3])))
