"""A rollout with a fake engine: about 20 tokens a second for each open sample, no weights, and faults by script."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rig.script import POLL_S, Script, gate, recorded_failures, run_dir, saved_tokens, tell, token

import robustrl
from robustrl.runtime.rollout import Lease, RolloutGuard


class Rollout:
    def __init__(self, me: RolloutGuard, script: Script, folder: Path) -> None:
        self.me = me
        self.script = script
        self.folder = folder
        self.who = str(me.identity)
        self.generated = 0
        self.failed = 0
        self.due = deque((["fail"] * script.failures + ["success"]) * script.rounds)

    def run(self) -> None:
        if self.script.background_fails:
            self._start_engine_loop()
        for lease in self.me.leases():
            self._hold(lease.prompt_index)
            if self._fails(lease):
                continue
            if not self._answer(lease):
                break

    def _answer(self, lease: Lease) -> bool:
        """Answers one prompt. False: this rollout leaves its loop here."""
        group = lease.prompt_index
        answers = [list(ids) for ids in lease.saved]
        left = [sample for sample, done in enumerate(lease.finished) if not done]
        with self.me.phase("generate"):
            while left and not lease.lost and not self.me.stopping:
                for sample in list(left):
                    if len(answers[sample]) >= self.script.length(group):
                        lease.finish(sample, 1.0, "length")
                        left.remove(sample)
                        continue
                    answers[sample].append(token(group, sample, len(answers[sample])))
                    lease.append(sample, answers[sample][-1], -0.5)
                    self.generated += 1
                if self._is_over(group):
                    return False
                time.sleep(self.script.token_s)  # what the engine takes
        return True

    # -- faults ----------------------------------------------------------------------------------------------------

    def _is_over(self, group: int) -> bool:
        member = str(self.me.identity.member)
        dies = member == self.script.exits_with_0 and self.me.identity.incarnation == 1
        leaves = member in self.script.leaves_early
        if not (dies or leaves) or not saved_tokens(self.folder, group):
            return False
        if dies:
            os._exit(0)
        return True

    def _hold(self, group: int) -> None:
        if self.script.hold_from is None or group < self.script.hold_from:
            return
        with self.me.phase("tool"):
            self._until(gate(self.folder, "go").exists)

    def _until(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self.me.stopping:
            time.sleep(POLL_S)

    def _fails(self, lease: Lease) -> bool:
        if self.due and self.due.popleft() == "fail":
            self.failed += 1
            lease.fail("sandbox", f"the sandbox of {self.who} died, failure {self.failed}")
            return True
        # A success comes after all failures of its round, so that those are consecutive.
        self._until(lambda: recorded_failures(self.folder) >= self.failed * self.script.rollouts)
        return False

    def _start_engine_loop(self) -> None:
        """The engine's own asyncio loop with a task that nobody awaits, as serving engines have them."""

        async def decode() -> None:
            while not gate(self.folder, "fault").exists():  # noqa: ASYNC110 - another process opens the gate
                await asyncio.sleep(POLL_S)
            raise ValueError(f"the decode task of {self.who} broke")

        async def engine() -> None:
            task = asyncio.create_task(decode())
            self.me.watch(task)
            await asyncio.Event().wait()  # it goes on, and would never look at the task

        threading.Thread(target=asyncio.run, args=(engine(),), daemon=True).start()


def main() -> None:
    script, folder = Script.from_env(), run_dir()
    with robustrl.guard(role="rollout") as me:
        rollout = Rollout(me, script, folder)
        rollout.run()
    tell(folder, rollout.who, saw="left", generated=rollout.generated, t=time.time())


if __name__ == "__main__":
    main()
