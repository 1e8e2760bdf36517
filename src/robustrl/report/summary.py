"""What a run came to: the figures of ``summary.json``, from its events alone, and two runs side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from robustrl.events import (
    BatchCommitted,
    BatchConsumed,
    Event,
    FaultInjected,
    JobEnded,
    JobStarted,
    Restored,
    StepDone,
    of_kind,
)
from robustrl.report.ettr import ettr, regenerated_tokens
from robustrl.report.lives import job_span, last_steps
from robustrl.report.recovery import Recovery, bystander_restarts, recoveries


class FaultRow(msgspec.Struct, frozen=True, kw_only=True):
    """One injected fault. `t_s` is seconds since the job started."""

    kind: str
    role: str
    member: str
    incarnation: int
    step: int
    phase: str
    t_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run. Times are seconds, rewards are means over the first and the last tenth of the steps."""

    outcome: str
    """``finished``, ``failed``, or ``unknown`` for a log without an end."""
    policy: str
    transport: str
    seed: int
    steps: int
    """Different steps that were done."""
    wall_s: float
    reward_first: float | None
    reward_last: float | None
    ettr_paper: float
    ettr_strict: float
    lost_trajectories: int
    duplicated_trajectories: int
    regenerated_tokens: int
    bystander_restarts: int
    faults: list[FaultRow]
    recoveries: list[Recovery]
    final_digest: str
    leftovers: dict[str, list[str]]

    @property
    def clean(self) -> bool:
        """Whether the run kept its promises: finished, nothing lost or used twice, no bystander hit, nothing left."""
        flaws = self.lost_trajectories + self.duplicated_trajectories
        if self.policy != "whole-job":
            flaws += self.bystander_restarts
        return self.outcome == "finished" and not flaws and not any(self.leftovers.values())


def summarize(
    events: Sequence[Event],
    *,
    prompts_per_step: int,
    samples_per_prompt: int,
    leftovers: Mapping[str, Sequence[str]] | None = None,
) -> Summary:
    """Computes a run's figures.

    Args:
        events: the job's log in time order.
        prompts_per_step: prompts in a batch (B); step t consumes the prompts (t-1)B to tB-1.
        samples_per_prompt: answers for each prompt (n).
        leftovers: what `robustrl.report.leftovers` found after the run.
    """
    started = next(of_kind(events, JobStarted), JobStarted(policy="", transport="", steps=0, members=()))
    ended = next(of_kind(reversed(events), JobEnded), None)
    start, end = job_span(events)
    steps = last_steps(events)
    first, last = _rewards(list(steps.values()))
    ratios = ettr(events)
    lost, duplicated = exactly_once(events, prompts_per_step, samples_per_prompt)
    return Summary(
        outcome=ended.outcome if ended is not None else "unknown",
        policy=started.policy,
        transport=started.transport,
        seed=started.seed,
        steps=len(steps),
        wall_s=end - start,
        reward_first=first,
        reward_last=last,
        ettr_paper=ratios.paper,
        ettr_strict=ratios.strict,
        lost_trajectories=lost,
        duplicated_trajectories=duplicated,
        regenerated_tokens=regenerated_tokens(events),
        bystander_restarts=bystander_restarts(events),
        faults=[
            FaultRow(
                kind=fault.kind,
                role=fault.member.partition("/")[0],
                member=fault.member,
                incarnation=fault.incarnation,
                step=fault.step,
                phase=fault.phase,
                t_s=fault.t - start,
            )
            for fault in of_kind(events, FaultInjected)
        ],
        recoveries=recoveries(events),
        final_digest=list(steps.values())[-1].digest if steps else "",
        leftovers={"processes": [], "ports": [], "shared_memory": []}
        | {kind: list(found) for kind, found in (leftovers or {}).items()},
    )


def exactly_once(events: Sequence[Event], prompts_per_step: int, samples_per_prompt: int) -> tuple[int, int]:
    """(lost, duplicated) trajectories at the optimizer.

    What counts is the last batch that each committed step consumed: earlier ones of the same step died with the
    trainer that took them. Lost: expected ids that no committed step consumed, up to the last committed step, or, in a
    job that finished, up to its last step. Duplicated: each consumption of an id after its first.
    """
    # Steps are committed in order: what a later commit or a restored point stands on is committed too, even if the
    # ledger was killed between storing a commit and saying so.
    last = max(
        [*(e.step for e in of_kind(events, BatchCommitted)), *(e.step for e in of_kind(events, Restored))], default=0
    )
    batches = {event.step: event.trajectories for event in of_kind(events, BatchConsumed) if event.step <= last}
    used = Counter(trajectory for batch in batches.values() for trajectory in batch)
    if any(event.outcome == "finished" for event in of_kind(events, JobEnded)):
        last = max(last, *(event.step for event in of_kind(events, StepDone)), 0)
    prompts = range(last * prompts_per_step)
    expected = {f"{prompt}/{sample}" for prompt in prompts for sample in range(samples_per_prompt)}
    return len(expected - used.keys()), sum(used.values()) - len(used)


def write_summary(summary: Summary, path: Path | str) -> None:
    """Writes the figures as JSON, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    draft.replace(path)


def read_summary(path: Path | str) -> Summary:
    return msgspec.json.decode(Path(path).read_bytes(), type=Summary)


class Compared(msgspec.Struct, frozen=True):
    """One figure of two runs. `ratio` is a / b, None where it means nothing."""

    name: str
    a: float | int | str | None
    b: float | int | str | None
    ratio: float | None


def compare(a: Summary, b: Summary) -> list[Compared]:
    """Two runs side by side, the figures that differ by policy first."""
    rows = [Compared("policy", a.policy, b.policy, None), Compared("outcome", a.outcome, b.outcome, None)]
    pairs: dict[str, tuple[float | int | None, float | int | None]] = {
        name: (getattr(a, name), getattr(b, name)) for name in ("wall_s", "ettr_paper", "ettr_strict", "steps")
    }
    pairs["mttr_mean_s"] = (mean_mttr(a), mean_mttr(b))
    pairs["unrecovered"] = (unrecovered(a), unrecovered(b))
    for name in (
        "regenerated_tokens",
        "bystander_restarts",
        "lost_trajectories",
        "duplicated_trajectories",
        "reward_first",
        "reward_last",
    ):
        pairs[name] = (getattr(a, name), getattr(b, name))
    rows += [Compared(name, left, right, _over(left, right)) for name, (left, right) in pairs.items()]
    return rows


def mean_mttr(summary: Summary) -> float | None:
    """Mean over the failures that were recovered; None without any."""
    times = [row.mttr_s for row in summary.recoveries if row.mttr_s is not None]
    return sum(times) / len(times) if times else None


def unrecovered(summary: Summary) -> int:
    return sum(row.mttr_s is None for row in summary.recoveries)


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _rewards(steps: Sequence[StepDone]) -> tuple[float | None, float | None]:
    rewards = [step.metrics["reward"] for step in steps if "reward" in step.metrics]
    if not rewards:
        return None, None
    count = max(3, len(rewards) // 10)
    first, last = rewards[:count], rewards[-count:]
    return sum(first) / len(first), sum(last) / len(last)
