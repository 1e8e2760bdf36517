"""A ledger server process for tests.

``python ledger_server.py RUN_DIR GROUPS_PER_BATCH SAMPLES STEPS [SETTING=VALUE...]``

Listens on a free port, writes it to ``RUN_DIR/address``, and serves until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec

from robustrl.config import PersistConfig
from robustrl.events import EventLog
from robustrl.persist import Ledger, LedgerService, Store
from robustrl.wire import RpcServer, Secret, bind


async def serve(folder: Path, groups: int, samples: int, steps: int, settings: dict[str, Any]) -> None:
    log = EventLog(folder / "events.jsonl", "manager/0#1")
    ledger = Ledger(
        Store(folder / "ledger.db"),
        lambda index: b"%d" % index,
        groups_per_batch=groups,
        samples_per_prompt=samples,
        total_steps=steps,
        config=PersistConfig(staleness=steps, **settings),
        emit=log.emit,
    )
    service = LedgerService(ledger, emit=log.emit)
    server = RpcServer(service.handle, Secret.read(folder / "secret"), bind())
    await server.start()
    temporary = folder / "address.new"
    temporary.write_text(str(server.address))
    temporary.rename(folder / "address")
    expiring = asyncio.create_task(service.expire_leases())
    await service.superseded.wait()
    expiring.cancel()


if __name__ == "__main__":
    given = {name: msgspec.json.decode(value) for name, _, value in (word.partition("=") for word in sys.argv[5:])}
    asyncio.run(serve(Path(sys.argv[1]), *map(int, sys.argv[2:5]), given))
