"""The rollout's guard: weights that follow the trainer, leases that outlive whoever works on them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

from robustrl.errors import DeadlineError, RobustError
from robustrl.persist import END, LeaseGrant, LeaseWriter, LedgerClient
from robustrl.reconnect import HeldVersion
from robustrl.roles import ROLLOUT, Phase, Version
from robustrl.runtime.follower import take_warm
from robustrl.runtime.guard import ATTACH_SECONDS, FAREWELL_SECONDS, Guard
from robustrl.runtime.ledger_link import ledger_link

if TYPE_CHECKING:
    import torch

LEASE_WAIT_S = 2.0
FIRST_WEIGHTS_S = 300.0
EXACT_WEIGHTS_S = 60.0
"""How long an exact older version is looked for before the lease is given back."""


class Lease:
    """The samples of one prompt, with what earlier owners had saved of them.

    Attributes:
        prompt_index: the prompt's number.
        prompt: the prompt, as the manager's prompt source gave it.
        saved: for each sample the token ids that are saved; they are not to be generated again.
        finished: for each sample whether it is whole already.
        version: the weights in use.
    """

    def __init__(self, grant: LeaseGrant, writer: LeaseWriter, version: Version, guard: RolloutGuard) -> None:
        self.prompt_index = grant.group
        self.prompt = grant.prompt
        self.saved = [sample.ids() for sample in grant.samples]
        self.finished = [sample.finished for sample in grant.samples]
        self.version = version
        self._version_text = str(version)
        self._writer = writer
        self._guard = guard

    @property
    def lost(self) -> bool:
        """Whether the group is somebody else's by now: work on it is to stop."""
        return self._writer.lost

    def append(self, sample: int, token: int, logprob: float) -> None:
        """Keeps one more token. It is saved in the background; this waits only when too much is unsaved."""
        self._guard.cell.tokens(1)
        self._writer.append(sample, token, logprob, self._version_text)

    def finish(self, sample: int, reward: float, reason: str = "") -> None:
        """The sample is whole and scored."""
        self._writer.finish(sample, reward, reason)

    def fail(self, kind: str, detail: str = "") -> None:
        """Something other than the answer failed (a tool, a sandbox): an outcome, never a reward."""
        self._writer.fail(kind, detail)


class RolloutGuard(Guard):
    """Guards a generation loop.

    Args:
        weights: the live tensors that generate, by name. Between leases they are overwritten with newer versions;
            None for an engine that is fed otherwise.
    """

    role = ROLLOUT

    def __init__(self, weights: Mapping[str, torch.Tensor] | None) -> None:
        super().__init__()
        self._weights = weights
        self._applied: HeldVersion | None = None
        self._serving = False

    def __enter__(self) -> RolloutGuard:
        super().__enter__()
        self._ledger_rpc = ledger_link(self)
        self._ledger = LedgerClient(self._ledger_rpc.call, flush_s=self.config.persist.flush_s)
        self._loop.run(self._start(), ATTACH_SECONDS)
        return self

    async def _start(self) -> None:
        self._stop = asyncio.Event()
        self.link.on_stop.append(self._stop.set)
        if self.link.stopping:
            self._stop.set()
        await self._ledger.start()
        if self._weights is not None:
            self._weights_from = self.follower()
            self.watch(await self._weights_from.start(take_warm()))
        await self.link.say("reloaded")

    def leases(self) -> Iterator[Lease]:
        """Prompts to answer; ends when the run needs no more answers or the job ends.

        Newer weights are loaded between two leases, never within one. Raises JobFailedError when the job is given up.
        """
        if self._weights is not None and self._weights_from.latest is None:
            with self.phase(Phase.SYNC):
                self._loop.run(self._first_weights(), FIRST_WEIGHTS_S + 5.0)
        while True:
            self.check()
            grant = self._loop.run(self._lease_now())
            if grant is None:
                with self.phase(Phase.WAIT):
                    grant = self._loop.run(self._lease_later())
            if grant is None:
                self.check()
                return
            version = self._use_weights(grant)
            lease = Lease(grant, self._ledger.writer(grant), version, self)
            self.cell.step = version.step + 1
            self.cell.active = sum(not done for done in lease.finished)
            yield lease
            self.cell.active = 0

    async def _first_weights(self) -> None:
        deadline = time.monotonic() + FIRST_WEIGHTS_S
        while self._weights_from.latest is None and not self.link.stopping:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"no weights within {FIRST_WEIGHTS_S:g} s",
                    who=self.identity,
                    phase=Phase.SYNC,
                    why="nobody published",
                )
            self._weights_from.newer.clear()
            await self._changed(1.0)

    async def _changed(self, timeout: float) -> None:
        """Returns when there is a newer version, or the word to stop, or after `timeout` seconds."""
        waits = [asyncio.create_task(self._stop.wait())]
        if self._weights is not None:
            waits.append(asyncio.create_task(self._weights_from.newer.wait()))
        try:
            await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:  # whoever waits for us may have stopped waiting
            for wait in waits:
                wait.cancel()

    async def _lease_now(self) -> LeaseGrant | None:
        """A lease, if there is one to have now."""
        if self.link.stopping:
            return None
        if not self._serving:
            self._use_newest()
            self._serving = True
            await self.link.say("serving")
        answer = await self._ledger.lease(self._held_steps(), wait_s=0.0)
        return answer if isinstance(answer, LeaseGrant) else None

    async def _lease_later(self) -> LeaseGrant | None:
        """The next lease; None when the run needs no more answers or the job ends."""
        while not self.link.stopping:
            if self._weights is not None:
                self._weights_from.newer.clear()  # before the steps are read: what comes after wakes us
            ask = asyncio.create_task(self._ledger.lease(self._held_steps(), wait_s=LEASE_WAIT_S))
            changed = asyncio.create_task(self._changed(LEASE_WAIT_S + 1.0))
            await asyncio.wait({ask, changed}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if not ask.done():
                ask.cancel()  # newer weights open newer batches: ask again; a grant on its way is kept for that
                await asyncio.gather(ask, return_exceptions=True)
                continue
            answer = ask.result()
            if answer is END:
                return None
            if isinstance(answer, LeaseGrant):
                return answer
        return None

    def _held_steps(self) -> list[int]:
        return self._weights_from.steps() if self._weights is not None else [1 << 40]

    def _use_newest(self) -> None:
        if self._weights is not None and self._weights_from.latest is not None:
            self._apply(self._weights_from.latest)

    def _use_weights(self, grant: LeaseGrant) -> Version:
        """Loads the version that this lease is to be answered with, if it is not loaded already."""
        if self._weights is None:
            return Version(0, 0)
        step = grant.required_step
        if step is None:
            self._use_newest()
        else:
            with self.phase(Phase.SYNC) if step not in self._weights_from.steps() else nullcontext():
                held = self._loop.run(self._weights_from.exactly(step, EXACT_WEIGHTS_S))
            if held is None:
                raise RobustError(
                    f"the weights of step {step} are needed and nobody holds them any more",
                    who=self.identity,
                    phase=Phase.SYNC,
                    do="Raise reconnect.keep_versions, or do not ask for exact staleness.",
                )
            self._apply(held)
        assert self._applied is not None
        return self._applied.version

    def _apply(self, held: HeldVersion) -> None:
        if self._applied is None or held.digest != self._applied.digest:
            assert self._weights is not None
            self._weights_from.subscriber.apply(held, self._weights)
        self._applied = held

    def _leave(self) -> None:
        self._loop.run(self._ledger.flush(FAREWELL_SECONDS), FAREWELL_SECONDS + 1.0)

    def _detach(self) -> None:
        # AttributeError: entering failed before they existed; that error is the one to show.
        with contextlib.suppress(RobustError, AttributeError):
            self._loop.run(self._close(), 2 * FAREWELL_SECONDS)
        super()._detach()

    async def _close(self) -> None:
        if self._weights is not None:
            await self._weights_from.close()
        await self._ledger.close(2.0)
        await self._ledger_rpc.close()
