"""A failed sample is never an end marker.

verl's rollouter says "no more samples" to the trainer whatever ended its loop, and the trainer then ends in good order:
a run was seen to report success at step 0 of 125. Here a sample that failed is made again; when that does not help, or
anything else ends the loop early, no end marker is sent, and the rollouter's fit raises what happened first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from robustrl.errors import RoleDownError
from robustrl_verl.fleet import first_line
from robustrl_verl.hub import session_config

log = logging.getLogger("robustrl.verl")

PAUSE_S: Final = 0.5
TROUBLE: Final = "_robustrl_trouble"
"""On the rollouter's queue client: what ended the loop early."""


async def process_sample(wrapped: Callable[..., Any], rollouter: Any, rollout_sample: Any) -> None:
    """Wraps FullyAsyncRollouter._process_single_sample_streaming: bounded tries, each from the prompt."""
    tries = session_config().persist.max_failure_streak
    prompt = rollout_sample.full_batch
    for attempt in range(1, tries + 1):
        try:
            rollout_sample.full_batch = prompt
            await wrapped(rollouter, rollout_sample)
            return
        except Exception as error:
            log.warning(
                "sample %s failed (try %d of %d): %s", rollout_sample.sample_id, attempt, tries, first_line(error)
            )
            if attempt == tries:
                _note(rollouter, error)
                raise RoleDownError(
                    f"sample {rollout_sample.sample_id} failed {tries} times", why=first_line(error)
                ) from error
        await asyncio.sleep(PAUSE_S)


async def noticed(wrapped: Callable[..., Any], rollouter: Any) -> None:
    """Wraps the rollouter's loops: what ends one early is noted before verl's clean-up says that all is done."""
    try:
        await wrapped(rollouter)
    except Exception as error:
        _note(rollouter, error)
        raise


async def put_sample(wrapped: Callable[..., Any], client: Any, sample: Any) -> Any:
    """Wraps MessageQueueClient.put_sample: keeps back an end marker that is none."""
    if sample is None and getattr(client, TROUBLE, None) is not None:
        return False
    return await wrapped(client, sample)


async def fit(wrapped: Callable[..., Any], rollouter: Any) -> Any:
    """Wraps FullyAsyncRollouter.fit, which swallows what its loops raise."""
    result = await wrapped(rollouter)
    trouble = getattr(rollouter.message_queue_client, TROUBLE, None)
    if trouble is not None:
        raise RoleDownError("the rollouter ended early", why=first_line(trouble)) from trouble
    return result


def _note(rollouter: Any, error: BaseException) -> None:
    if getattr(rollouter.message_queue_client, TROUBLE, None) is None:
        setattr(rollouter.message_queue_client, TROUBLE, error)
