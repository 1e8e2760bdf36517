"""A request that was on a lost replica is continued on another.

verl's client passes prompt and tokens so far to each leg of a request, and a leg ends with each new version of the
weights. What earlier legs brought is therefore kept; what the running leg had made died with the server, and is made
again elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Callable
from typing import Any, Final

from robustrl.errors import RoleDownError
from robustrl_verl.fleet import first_line
from robustrl_verl.hub import find_hub, session_config

log = logging.getLogger("robustrl.verl")

PAUSE_S: Final = 0.2
NOBODY_S: Final = 30.0
"""Seconds that a request waits for a server while there is none; then it is given up. The hub ends the job before."""
DEAD_ENGINES: Final = ("EngineDeadError", "EngineGenerateError")
"""Names of errors that say of the engine, not of the request, that it is broken."""

_server: contextvars.ContextVar[str] = contextvars.ContextVar("robustrl_server", default="")


async def acquire_server(wrapped: Callable[..., Any], client: Any, request_id: str, **extra: Any) -> Any:
    """Wraps LLMServerClient._acquire_server: notes on which server the request is."""
    server, handle = await wrapped(client, request_id, **extra)
    _server.set(server)
    return server, handle


async def generate(wrapped: Callable[..., Any], client: Any, request_id: Any, **kwargs: Any) -> Any:
    """Wraps LLMServerClient.generate, one leg of a request. Raises RoleDownError after bounded tries."""
    tries = session_config().persist.max_failure_streak
    waited = 0.0
    cause: BaseException | None = None
    for attempt in range(1, tries + 1):
        _server.set("")
        try:
            while True:
                try:
                    return await wrapped(client, request_id, **dict(kwargs))
                except RuntimeError as error:
                    if "No available servers" not in str(error) or waited >= NOBODY_S:
                        raise
                    waited += PAUSE_S
                    await asyncio.sleep(PAUSE_S)
        except Exception as error:
            if not server_lost(error):
                raise
            cause, server = error, _server.get()
        log.warning("request %s lost its server %s (try %d of %d)", request_id, server, attempt, tries)
        if server:
            # At once, not by way of the hub: until then every new request goes to the server that is dead.
            client._load_balancer.remove_servers.remote([server])
            with contextlib.suppress(RoleDownError):
                find_hub().lost.remote(server, f"was lost under a request: {first_line(cause)}")
        await asyncio.sleep(PAUSE_S)
    raise RoleDownError(
        f"request {request_id} was given up after {tries} tries", why=first_line(cause) if cause else None
    ) from cause


def server_lost(error: BaseException) -> bool:
    """Whether an error of a request says that its server is lost, and nothing about the request itself."""
    from ray.exceptions import RayActorError, RayTaskError

    if isinstance(error, RayActorError):
        return True
    if isinstance(error, RayTaskError):
        cause = error.cause
        return isinstance(cause, RayActorError) or type(cause).__name__ in DEAD_ENGINES
    return False
