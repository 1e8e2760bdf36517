"""The trainer's guard: batches from the ledger, a durable point a step, a weight version a step."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from robustrl import events
from robustrl.errors import ConfigError, JobFailedError, RobustError
from robustrl.persist import Batch, End, LedgerClient
from robustrl.persist.digest import state_digest
from robustrl.persist.snapshot import Frozen, Snapshotter, restore_into
from robustrl.reconnect import DirectoryClient, WeightPublisher
from robustrl.restart import MemberState
from robustrl.roles import MANAGER, ROLLOUT, TRAINER, Member, Phase, Version
from robustrl.runtime.follower import take_warm
from robustrl.runtime.guard import FAREWELL_SECONDS, Guard
from robustrl.runtime.ledger_link import ledger_link

if TYPE_CHECKING:
    import torch

WAIT_S = 2.0
"""Seconds that one question for a batch waits at the ledger; in between the job's failure is looked for."""
NOTICE_CALL_S = 2.0
"""The longest that finding out whom we wait for may take; the wait itself goes on meanwhile."""


class TrainerGuard(Guard):
    """Guards a training loop.

    On entry the newest durable point, if there is one, is restored into `state` in place, and `step` says how many
    optimizer steps are done. The loop then goes on as if nothing had happened: the batches that follow are those that
    would have followed.

    Args:
        state: what a step changes: modules, optimizers, anything with ``state_dict`` and ``load_state_dict``. The
            random generators of torch, numpy and Python are kept along with it.
    """

    role = TRAINER

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__()
        self.state = dict(state)
        self._saving: concurrent.futures.Future[Any] | None = None
        self._saver = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="robustrl-save")
        self._yielded = 0
        self._serving = False

    def __enter__(self) -> Self:
        super().__enter__()
        config = self.config
        self._snapshots = Snapshotter(self.place.run_dir / "points", config.persist.keep_points, self.emit)
        self._ledger_rpc = ledger_link(self)
        self._ledger = LedgerClient(self._ledger_rpc.call)
        self._publisher = WeightPublisher(
            self.identity, DirectoryClient(self.link.call), config.reconnect, self.secret, self.emit
        )
        self._loop.run(self._publisher.start(), 30.0)
        warm = take_warm()
        if warm is not None:
            self._loop.run(warm.close(), 30.0)  # after the start: what the transports share stays up
        self.link.on_connect.append(self._publisher.reannounce)
        self._restore()
        return self

    def _restore(self) -> None:
        begun = time.monotonic()
        point = self._snapshots.newest()
        if point is not None:
            restore_into(self.state, self._snapshots.load(point))
            self.step = point.step
            self.emit(events.Restored(step=self.step, source="disk", seconds=time.monotonic() - begun))
        self.cell.step = self.step + 1
        # The ledger hands out everything after this step again, exactly as it was.
        self._loop.run(self._ledger.rewind(self.step), self._ledger_rpc.patience_s + 5.0)
        if self.config.restart.policy == "whole-job" and self.identity.incarnation > 1:
            # What people have today: a restart goes back to the checkpoint, and all that was under way is lost.
            self._loop.run(self._ledger.discard_uncommitted())
        self._loop.run(self.link.say("reloaded", f"step {self.step}" if point else "a fresh start"), 30.0)

    def batches(self) -> Iterator[Batch]:
        """The batches of the steps to come; ends when the job's last one was yielded or its prompts are used up.

        Each batch is to be followed by `step_done`. While rollouts or the ledger are away this waits; it raises
        JobFailedError with the first cause as soon as the job is given up.
        """
        while True:
            with self.phase(Phase.WAIT):
                batch = self._next_batch()
            if batch is None:
                return
            self._yielded = batch.step
            yield batch
            if self.step != batch.step:
                raise ConfigError(
                    f"the batch of step {batch.step} was not followed by step_done()",
                    who=self.identity,
                    do="Call step_done() once at the end of each step.",
                )

    def _next_batch(self) -> Batch | None:
        if not self._serving:
            self._serving = True
            self._loop.run(self.link.say("serving"), 30.0)
        batch = self._loop.run(self._wait_for_batch())
        return batch if isinstance(batch, Batch) else None

    async def _wait_for_batch(self) -> Batch | End:
        """Ends with the batch, with END, or with the error that there will be neither."""
        begun = noticed = time.monotonic()
        while True:
            self.check()
            nobody_works = self._rollouts_have_finished()
            asked = asyncio.create_task(self._ledger.next_batch(self.step + 1, wait_s=WAIT_S))
            try:
                while not asked.done():
                    notice_in = noticed + self.config.detect.notice_s - time.monotonic()
                    await asyncio.wait({asked}, timeout=max(0.0, notice_in))
                    now = time.monotonic()
                    if not asked.done() and now - noticed >= self.config.detect.notice_s:
                        noticed = now
                        await self._say_who_is_awaited(now - begun)
                answer = asked.result()
            finally:
                asked.cancel()
            if answer is not None:
                return answer
            if nobody_works:
                raise JobFailedError(
                    f"step {self.step + 1} will never have its batch",
                    who=self.identity,
                    phase=Phase.WAIT,
                    why="every rollout has finished, and answers of the batch are missing",
                    do="A rollout's loop ends when leases() does, not before.",
                )

    def _rollouts_have_finished(self) -> bool:
        """Whether there are rollouts and each has said that its work is done: none of them will be replaced."""
        states = [state for name, (_, state) in self.link.members.items() if Member.parse(name).role == ROLLOUT]
        return bool(states) and all(state == MemberState.FINISHED for state in states)

    async def _say_who_is_awaited(self, seconds: float) -> None:
        """The no-progress notice: which role, in which phase, is the batch waiting for?"""
        role = ROLLOUT if self._ledger_rpc.connected else MANAGER
        stats = "away"
        try:
            async with asyncio.timeout(NOTICE_CALL_S):
                rows = await self.link.call("job.status")
                awaited = ", ".join(
                    f"{row['member']}#{row['incarnation']} {row['state']} in phase {row['phase'] or 'unknown'}"
                    for row in rows
                    if Member.parse(row["member"]).role == role
                )
                if self._ledger_rpc.connected:
                    stats = str(await self._ledger.stats())
        except (RobustError, TimeoutError) as error:
            awaited = f"nobody answers for it ({error or 'no answer in time'})"
        self.emit(
            events.Alarm(
                member=str(self.identity.member),
                text=f"step {self.step + 1} has waited {seconds:.0f} s for its batch; awaited role {role}: {awaited}; "
                f"ledger: {stats}",
            )
        )

    def step_done(self, metrics: Mapping[str, float] | None = None) -> None:
        """Ends a step: the state is copied to host memory, and goes to disk in the background.

        When this returns, the caller may change its state. The step's trajectories are committed in the ledger once
        the point is on disk; until then a trainer that dies repeats the step with the very same batch.
        """
        if self._yielded != self.step + 1:
            raise ConfigError("step_done() without a batch", who=self.identity, do="Call it once a batch.")
        with self.phase(Phase.CHECKPOINT):
            self._saved()  # one save at a time: memory stays bounded
            frozen = self._snapshots.freeze(self.state)
            self.step += 1
            self.emit(
                events.StepDone(
                    step=self.step,
                    incarnation=self.identity.incarnation,
                    metrics=dict(metrics or {}),
                    digest=state_digest(frozen.state),
                )
            )
            self._saving = self._saver.submit(self._save, frozen, self.step)
        self.cell.move()

    def _save(self, frozen: Frozen, step: int) -> None:
        self._snapshots.save(frozen, step, {"incarnation": self.identity.incarnation})
        self._loop.run(self._ledger.commit(step))

    def _saved(self) -> None:
        """Waits for the save under way and raises what it raised."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def publish(self, tensors: Mapping[str, torch.Tensor]) -> Version:
        """Publishes the weights of the step that was done last. When this returns the caller may change them."""
        version = Version(self.identity.incarnation, self.step)
        with self.phase(Phase.SYNC):
            self._loop.run(self._publisher.publish(tensors, version), 120.0)
        self.cell.step = self.step + 1
        return version

    def _leave(self) -> None:
        self._saved()

    def _detach(self) -> None:
        self._saver.shutdown(wait=False, cancel_futures=True)
        # AttributeError: entering failed before they existed; that error is the one to show.
        with contextlib.suppress(RobustError, AttributeError):
            self._loop.run(self._publisher.close(), FAREWELL_SECONDS)
            self._loop.run(self._ledger_rpc.close(), FAREWELL_SECONDS)
        super()._detach()
