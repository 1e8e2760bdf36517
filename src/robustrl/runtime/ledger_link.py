"""How a member reaches the ledger, wherever its server is now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from robustrl.wire import RpcClient

if TYPE_CHECKING:
    from robustrl.runtime.guard import Guard

LEDGER = "ledger"
PATIENCE_S = 60.0
"""Seconds that a call to the ledger waits while its server is being brought back."""


def ledger_link(guard: Guard) -> RpcClient:
    """A client that finds the ledger through the supervisor and finds it again after each loss."""

    client = RpcClient(
        lambda: guard.link.locate(LEDGER),
        guard.identity,
        guard.secret,
        patience_s=PATIENCE_S,
        server="the ledger",
    )

    def stopped() -> None:
        if guard.link.failure is not None:
            client.fail(guard.link.failure)

    guard.link.on_stop.append(stopped)
    stopped()
    return client
