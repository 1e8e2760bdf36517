"""The queue process of the scenarios: the prompt source and the ledger."""

from __future__ import annotations

from rig.script import Script, run_dir, tell

import robustrl


def main() -> None:
    script = Script.from_env()
    with robustrl.guard(role="manager") as me:
        me.serve_ledger(
            lambda index: f"prompt {index}".encode(),
            groups_per_batch=script.groups,
            samples_per_prompt=script.samples,
            total_steps=script.steps,
        )
    tell(run_dir(), str(me.identity), saw="left")


if __name__ == "__main__":
    main()
