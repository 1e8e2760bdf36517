"""How a member reaches the ledger, wherever its server is now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from robustrl import events
from robustrl.wire import Address, RpcClient

if TYPE_CHECKING:
    from robustrl.runtime.guard import Guard

LEDGER = "ledger"
PATIENCE_S = 60.0
"""Seconds that a call to the ledger waits while its server is being brought back."""


def ledger_link(guard: Guard) -> RpcClient:
    """A client that finds the ledger through the supervisor and finds it again after each loss, which it says."""
    reached = False

    def connected() -> None:
        nonlocal reached
        reached = True

    async def locate() -> Address:
        nonlocal reached
        if reached and not guard.stopping:
            reached = False
            guard.emit(
                events.Alarm(
                    member=str(guard.identity.member),
                    text="role manager is down: the connection to the ledger ended; waiting for it to come back",
                )
            )
        return await guard.link.locate(LEDGER)

    client = RpcClient(
        locate,
        guard.identity,
        guard.secret,
        on_connect=connected,
        patience_s=PATIENCE_S,
        server="the ledger",
    )

    def stopped() -> None:
        if guard.link.failure is not None:
            client.fail(guard.link.failure)

    guard.link.on_stop.append(stopped)
    stopped()
    return client
