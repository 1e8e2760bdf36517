"""A trainer without a model: it waits for batches and tells what it saw."""

from __future__ import annotations

import time
from typing import Any

from rig.script import POLL_S, Script, gate, run_dir, tell

import robustrl
from robustrl.errors import RobustError


class Counter:
    """State as a trainer has it."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def main() -> None:
    script, folder, state = Script.from_env(), run_dir(), Counter()
    with robustrl.guard(role="trainer", state={"counter": state}) as me:
        who = str(me.identity)
        tell(folder, who, saw="start", t=time.time())
        try:
            for batch in me.batches():
                answers = {one.id: one.ids() for one in batch.trajectories}
                tell(folder, who, saw="batch", step=batch.step, answers=answers, t=time.time())
                with me.phase("train"):
                    state.steps += 1
                me.step_done()
                if batch.step == script.trainer_stops_after:
                    while not gate(folder, "stop").exists():
                        time.sleep(POLL_S)
                    break
        except RobustError as error:
            tell(folder, who, saw="error", kind=type(error).__name__, text=str(error), t=time.time())
            raise
    tell(folder, who, saw="left", steps=state.steps, t=time.time())


if __name__ == "__main__":
    main()
