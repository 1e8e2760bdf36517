"""The manager's guard: it holds the prompts and serves the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from robustrl.persist import Ledger, LedgerService, Store
from robustrl.restart.membership import LIVING
from robustrl.roles import MANAGER, Member, Phase
from robustrl.runtime.guard import FAREWELL_SECONDS, Guard
from robustrl.runtime.ledger_link import LEDGER
from robustrl.wire import RpcServer, bind


class ManagerGuard(Guard):
    """Guards the process that owns the prompt source."""

    role = MANAGER

    def serve_ledger(
        self,
        prompt: Callable[[int], bytes | list[int] | None],
        *,
        groups_per_batch: int,
        samples_per_prompt: int,
        total_steps: int,
    ) -> None:
        """Serves the trajectory ledger until the job ends.

        Args:
            prompt: the prompt with this number, or None past the last one; the same number gives the same prompt.
            groups_per_batch: prompts in one optimizer step.
            samples_per_prompt: answers to one prompt (the group's size in GRPO).
            total_steps: optimizer steps of the job.
        """
        self._loop.run(self._serve(prompt, groups_per_batch, samples_per_prompt, total_steps))

    async def _serve(
        self,
        prompt: Callable[[int], bytes | list[int] | None],
        groups_per_batch: int,
        samples_per_prompt: int,
        total_steps: int,
    ) -> None:
        store = Store(self.place.run_dir / "ledger.db")
        self._ledger = Ledger(
            store,
            prompt,
            groups_per_batch=groups_per_batch,
            samples_per_prompt=samples_per_prompt,
            total_steps=total_steps,
            config=self.config.persist,
            emit=self.emit,
        )
        await self.link.say("reloaded")
        service = LedgerService(self._ledger, emit=self.emit)
        server = RpcServer(service.handle, self.secret, bind())
        await server.start()
        expiring = asyncio.create_task(service.expire_leases())
        try:
            self.link.on_membership.append(self._fence_the_dead)
            await self._fence_the_dead()
            await self.link.offer(LEDGER, server.address)
            await self.link.say("serving")
            with self.phase(Phase.IDLE):
                await self.link.stopped()
                # The others end first: what they still have to say is taken.
                await self._last_words(server)
        finally:
            self.link.on_membership.remove(self._fence_the_dead)
            expiring.cancel()
            await asyncio.gather(expiring, return_exceptions=True)
            await server.close()
            store.close()

    async def _fence_the_dead(self) -> None:
        """Releases what older incarnations and members that are over held: one that finished in the middle of a lease
        (its loop was left early) does not come back to it either."""
        for name, (incarnation, state) in self.link.members.items():
            self._ledger.release_owner(Member.parse(name), incarnation if state in LIVING else incarnation + 1)

    async def _last_words(self, server: RpcServer) -> None:
        for _ in range(int(FAREWELL_SECONDS / 0.05)):
            if not server.connected() - {self.identity}:
                return
            await self.link.stopped(0.05)
