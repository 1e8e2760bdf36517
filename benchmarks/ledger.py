"""The trajectory ledger: tokens kept a second, what it costs a rollout, bytes a token, and the time to come back.

All ways are measured in the same run, taking turns. JSON lines with an fsync a record and pickles in a Ray actor's
memory are what people write when they have no ledger; the first survives a power loss, the second not even its actor.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import _actors
import _common
from _common import claim, median
from _journals import ActorJournal, Journal, LedgerJournal, LinesJournal, fill, reopen
from _overhead import rollout_rates


class Plan(NamedTuple):
    writers: int
    trajectories: int
    length: int
    seconds: float
    rounds: int
    stored: int
    """Trajectories of the ledger that is opened again."""
    tokens: int
    in_flight: int
    tokens_generated: int
    """Tokens of one turn of the overhead's measurement."""


QUICK = Plan(8, 64, 256, 2.0, 2, 10_000, 500, 1_000, 4_000)
FULL = Plan(8, 64, 256, 5.0, 3, 100_000, 500, 10_000, 12_000)
GROUP = 8


def opened(way: str, plan: Plan) -> Journal:
    match way:
        case "ledger":
            return LedgerJournal(plan.writers, plan.trajectories, plan.length)
        case "jsonl":
            return LinesJournal(plan.writers, plan.trajectories)
    return ActorJournal(plan.writers, plan.trajectories)


def sustained(plan: Plan, ways: list[str]) -> list[dict[str, Any]]:
    rows = []
    for round_ in range(plan.rounds):
        for way in ways[round_ % len(ways) :] + ways[: round_ % len(ways)]:
            row: dict[str, Any] = {"kind": "sustained", "way": way, "round": round_}
            try:
                with contextlib.closing(opened(way, plan)) as journal:
                    journal.run(0.5)
                    before = journal.bytes()
                    done = journal.run(plan.seconds)
                    tokens = sum(count for count, _ in done)
                    row |= {
                        "tokens_per_s": round(tokens / max(seconds for _, seconds in done)),
                        "bytes_per_token": round((journal.bytes() - before) / tokens, 2)
                        if way != "ray actor"
                        else None,
                    }
            except (RuntimeError, TimeoutError, OSError, EOFError) as error:
                traceback.print_exc()
                row["failed"] = str(error).strip().splitlines()[-1]
            rows.append(row)
    return rows


def coming_back(plan: Plan) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="rrbench-"))
    try:
        path = folder / "ledger.db"
        for done in fill(path, plan.stored, plan.tokens, plan.in_flight, GROUP):
            print(f"\rfilled {done} of {plan.stored} trajectories", end="", flush=True)
        print()
        size = sum(each.stat().st_size for each in folder.iterdir())
        rows = []
        for round_ in range(plan.rounds):
            copy = folder / "copy"
            copy.mkdir()
            for each in folder.glob("ledger.db*"):
                shutil.copy(each, copy / each.name)
            open_s, hand_out_s, given = reopen(copy / "ledger.db", GROUP)
            shutil.rmtree(copy)
            rows.append(
                {
                    "kind": "coming back",
                    "round": round_,
                    "trajectories": plan.stored,
                    "tokens": plan.stored * plan.tokens,
                    "open_s": round(open_s, 4),
                    "handed_out": given,
                    "hand_out_s": round(hand_out_s, 4),
                    "bytes_per_token": round(size / plan.stored / plan.tokens, 3),
                }
            )
        return rows
    finally:
        shutil.rmtree(folder)


def figure(rows: list[dict[str, Any]], name: str, **where: Any) -> float | None:
    return median(
        row[name] for row in rows if row.get(name) is not None and all(row.get(key) == where[key] for key in where)
    )


def claims(rows: list[dict[str, Any]], plan: Plan) -> list[dict[str, Any]]:
    rate = {way: figure(rows, "tokens_per_s", way=way) for way in ("ledger", "jsonl", "ray actor")}
    missing = "not measured in this run: see the rows"
    made = []
    for other in ("jsonl", "ray actor"):
        ours, theirs = rate["ledger"], rate[other]
        value = ours / theirs if ours and theirs else None
        made.append(
            claim(f"tokens a second, of {other}'s", value, "ratio", ">=", 1.0, missing if value is None else "")
        )
    cost = figure(rows, "slowdown", kind="overhead")
    made.append(claim("rollout throughput that the ledger costs the reference model", cost, "fraction", "<=", 0.01))
    at = {"kind": "coming back"}
    size = f"{plan.stored:,} trajectories, {plan.stored * plan.tokens:,} tokens"
    made.append(claim(f"opening a ledger of {size}", figure(rows, "open_s", **at), "s", "<=", 2.0))
    made.append(
        claim(f"handing out {plan.in_flight:,} that were under way", figure(rows, "hand_out_s", **at), "s", "<=", 1.0)
    )
    return made


def main() -> None:
    args = _common.arguments(__doc__ or "")
    plan = QUICK if args.quick else FULL
    conditions = _common.conditions(plan=plan._asdict())
    _actors.preload("robustrl.persist", "_journals")
    ways = ["ledger", "jsonl"] + (["ray actor"] if importlib.util.find_spec("ray") else [])
    rows = sustained(plan, ways)
    rows += rollout_rates(plan.tokens_generated, plan.rounds)
    rows += coming_back(plan)
    for way in ways:
        rate, size = figure(rows, "tokens_per_s", way=way), figure(rows, "bytes_per_token", way=way)
        print(f"{way:<10} {rate or 0:>12,.0f} tokens/s {size or 0:>8.1f} bytes a token")
    _common.write(args.json, conditions, rows, claims(rows, plan))


if __name__ == "__main__":
    main()
