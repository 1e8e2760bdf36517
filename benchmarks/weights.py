"""Weight transfer: robustrl's transports beside gloo broadcast, Ray's object store, raw TCP and memcpy.

Everything is measured in the same run, the ways taking turns. Figures are medians: seconds from the trainer's start
until the last receiver has the weights in its live tensors (`seconds`), and bytes delivered a second (`gb_per_s`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import _actors
import _common
from _common import claim, median
from _links import Links, why_not
from _transfers import CopyRig, GlooRig, RawRig, RayCluster, Rig, RobustRig

MIB = 1 << 20
WARM_UP_SYNCS = 4
"""A job syncs thousands of times: what is timed are syncs between buffers that all have been used once."""
SPARE_BYTES = 4 << 30
"""Memory left to everyone else."""


class Cell(NamedTuple):
    """`rounds` visits to each way in turn, `syncs` timed transfers a visit."""

    size: int
    receivers: int
    rounds: int
    syncs: int


class Plan(NamedTuple):
    cells: list[Cell]
    joiner_bytes: int
    joiner_rounds: int
    link_bytes: int
    link_mbit: int
    link_rounds: int


QUICK = Plan(
    cells=[Cell(16 * MIB, 1, 2, 2), Cell(16 * MIB, 4, 2, 2), Cell(96 * MIB, 1, 2, 2), Cell(96 * MIB, 4, 2, 1)],
    joiner_bytes=64 * MIB,
    joiner_rounds=2,
    link_bytes=24 * MIB,
    link_mbit=200,
    link_rounds=1,
)
FULL = Plan(
    cells=[
        *(Cell(16 * MIB, receivers, 3, 3) for receivers in (1, 2, 4, 8)),
        *(Cell(256 * MIB, receivers, 3, 2) for receivers in (1, 2, 4, 8)),
        *(Cell(2048 * MIB, receivers, 1, 2) for receivers in (1, 2, 4, 8)),
    ],
    joiner_bytes=256 * MIB,
    joiner_rounds=5,
    link_bytes=32 * MIB,
    link_mbit=400,
    link_rounds=3,
)


class Way(NamedTuple):
    """`copies(receivers)` is how many times a version's size it needs in memory."""

    name: str
    open: Callable[[int, int], contextlib.AbstractContextManager[Rig]]
    copies: Callable[[int], float]
    most_receivers: int = 8


def installed(*modules: str) -> bool:
    return any(importlib.util.find_spec(module) for module in modules)


def opened(make: Callable[[int, int], Rig]) -> Callable[[int, int], contextlib.AbstractContextManager[Rig]]:
    @contextlib.contextmanager
    def rig(size: int, receivers: int) -> Iterator[Rig]:
        made = make(size, receivers)
        try:
            yield made
        finally:
            made.close()

    return rig


def robust(transport: str) -> Way:
    mapped = transport in ("shm", "auto")
    # At the trainer its live tensors and three buffers in turn; so at a receiver, unless it maps the trainer's.
    return Way(
        transport,
        opened(lambda size, receivers: RobustRig(transport, size, receivers)),
        lambda n: 4.0 + n if mapped else 4.0 + 3.0 * n,
    )


def ways(cluster: RayCluster | None) -> list[Way]:
    found = [robust("shm"), robust("tcp"), robust("auto")]
    if installed("ucxx"):
        found.append(robust("ucx"))
    if installed("nixl", "nixl_cu12"):
        found.append(robust("nixl"))
    found += [
        Way("gloo", opened(GlooRig), lambda n: n + 1.0),
        Way("raw tcp", opened(RawRig), lambda n: n + 1.0),
        Way("memcpy", opened(lambda size, receivers: CopyRig(size)), lambda n: 3.0, most_receivers=1),
    ]
    if cluster is not None:
        found.append(Way("ray", cluster.rig, lambda n: n + 3.0))
    return found


def measure(cell: Cell, ways: list[Way]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    where = {"kind": "transfer", "bytes": cell.size, "receivers": cell.receivers}
    for round_ in range(cell.rounds):
        # Each round begins with another way: who comes after whom changes as well.
        turn = round_ * len(ways) // cell.rounds
        for way in ways[turn:] + ways[:turn]:
            if cell.receivers > way.most_receivers:
                continue
            row = {**where, "way": way.name, "round": round_}
            gc.collect()
            need, there = int(way.copies(cell.receivers) * cell.size), _common.available_bytes() - SPARE_BYTES
            if need > there:
                rows.append({**row, "skipped": f"needs {need / 1e9:.1f} GB of memory, {there / 1e9:.1f} GB are there"})
                continue
            try:
                with way.open(cell.size, cell.receivers) as rig:
                    for step in range(1, WARM_UP_SYNCS + cell.syncs + 1):
                        done = rig.sync(step)
                        timed = {
                            "warm_up": step <= WARM_UP_SYNCS,
                            "seconds": round(done.last, 6),
                            "first_s": round(done.each[0], 6),
                            "trainer_s": round(done.trainer, 6),
                            "gb_per_s": round(cell.size * cell.receivers / done.last / 1e9, 4),
                        }
                        rows.append(row | timed)
            except (RuntimeError, TimeoutError, OSError) as error:
                traceback.print_exc()
                rows.append({**row, "failed": str(error).strip().splitlines()[-1]})
    return rows


def joiners(plan: Plan, transports: list[str]) -> list[dict[str, Any]]:
    """A member that joins when all is over, beside the first that pulled: both are fresh processes."""
    rows = []
    for round_ in range(plan.joiner_rounds):
        for transport in transports:
            rig = RobustRig(transport, plan.joiner_bytes, 0)
            try:
                rig.trainer.ask("prepare", step=1)
                rig.trainer.ask("give", step=1)
                members = [rig.member(f"rollout/{index}#1", 1) for index in range(5)]
                rig.receivers += members
                single, _ = members[0].ask("join", step=1)
                for member in members[1:4]:
                    member.ask("join", step=1)
                before = rig.trainer.ask("served")
                joined, _ = members[4].ask("join", step=1)
                cost = rig.trainer.ask("served") - before
            finally:
                rig.close()
            rows.append(
                {
                    "kind": "joiner",
                    "way": transport,
                    "bytes": plan.joiner_bytes,
                    "round": round_,
                    "single_s": round(single, 6),
                    "joiner_s": round(joined, 6),
                    "trainer_bytes": cost,
                }
            )
    return rows


def limited_links(plan: Plan, transports: list[str]) -> list[dict[str, Any]]:
    """One and eight receivers over links of limited rate, and the star that sends to all at once."""
    rows = []
    links = Links(9, mbit=plan.link_mbit)
    try:
        for round_ in range(plan.link_rounds):
            for way in (*transports, "raw tcp"):
                for receivers in (1, 8):
                    row = {
                        "kind": "links",
                        "way": way,
                        "bytes": plan.link_bytes,
                        "mbit_per_s": plan.link_mbit,
                        "receivers": receivers,
                        "round": round_,
                    }
                    rig: Rig | None = None
                    try:
                        if way == "raw tcp":
                            rig = RawRig(plan.link_bytes, receivers, links.places)
                        else:
                            rig = RobustRig(way, plan.link_bytes, receivers, links.places)
                        rows.append(row | {"seconds": round(rig.sync(1).last, 6)})
                    except (RuntimeError, TimeoutError, OSError) as error:
                        traceback.print_exc()
                        rows.append(row | {"failed": str(error).strip().splitlines()[-1]})
                    finally:
                        if rig is not None:
                            rig.close()
    finally:
        links.close()
    return rows


def figure(rows: list[dict[str, Any]], name: str, **where: Any) -> float | None:
    """The median of a column over the rows that fit; warm-ups left out."""
    wanted = {"warm_up": False, **where} if where.get("kind") == "transfer" else where
    return median(row[name] for row in rows if name in row and all(row.get(key) == wanted[key] for key in wanted))


def ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table: medians of each cell and way, and the time relative to gloo, raw TCP and Ray."""
    keys = dict.fromkeys((row["bytes"], row["receivers"]) for row in rows if row["kind"] == "transfer")
    names = dict.fromkeys(row["way"] for row in rows if row["kind"] == "transfer")
    table = []
    for size, receivers in keys:
        at = {"kind": "transfer", "bytes": size, "receivers": receivers}
        bases = {base: figure(rows, "seconds", **at, way=base) for base in ("gloo", "raw tcp", "ray")}
        for way in names:
            seconds = figure(rows, "seconds", **at, way=way)
            if seconds is None:
                continue
            line: dict[str, Any] = {
                "kind": "median",
                "bytes": size,
                "receivers": receivers,
                "way": way,
                "seconds": round(seconds, 6),
                "gb_per_s": round(size * receivers / seconds / 1e9, 3),
                "trainer_s": figure(rows, "trainer_s", **at, way=way),
            }
            for base, theirs in bases.items():
                if theirs is not None and way != base:
                    line[f"times_{base.replace(' ', '_')}"] = round(seconds / theirs, 3)
            table.append(line)
    return table


def claims(rows: list[dict[str, Any]], plan: Plan, no_links: str) -> list[dict[str, Any]]:
    made = []
    missing = "not measured in this run: see the rows"

    def add(name: str, value: float | None, op: Any, goal: float, unit: str = "ratio", why: str = missing) -> None:
        made.append(claim(name, value, unit, op, goal, why if value is None else ""))

    for size in dict.fromkeys(cell.size for cell in plan.cells):
        one = {"kind": "transfer", "bytes": size, "receivers": 1}
        four = one | {"receivers": 4}
        label = f"{size // MIB} MiB"
        shm, ucx, raw, copies = (figure(rows, "seconds", **one, way=way) for way in ("shm", "ucx", "raw tcp", "memcpy"))
        add(f"{label}, 1 receiver: shm's rate of the rate of two memcpys", ratio(copies, shm), ">=", 0.7)
        add(f"{label}, 1 receiver: ucx's rate of blocking raw TCP's", ratio(raw, ucx), ">=", 1.0)
        auto, gloo = (figure(rows, "seconds", **four, way=way) for way in ("auto", "gloo"))
        add(f"{label}, 4 receivers: auto's time to the last of gloo's", ratio(auto, gloo), "<=", 0.5)
    joined = [row for row in rows if row["kind"] == "joiner"]
    cost = max((row["trainer_bytes"] for row in joined), default=None)
    add("joiner after the sync: bytes from the trainer", cost, "<=", 0, "bytes")
    auto_rows = [row for row in joined if row["way"] == "auto"]
    join = ratio(median(row["joiner_s"] for row in auto_rows), median(row["single_s"] for row in auto_rows))
    add("joiner after the sync: its time of a single pull's, auto", join, "<=", 1.2)
    why = no_links or missing
    at = {"kind": "links", "way": "tcp"}
    spread = ratio(figure(rows, "seconds", **at, receivers=8), figure(rows, "seconds", **at, receivers=1))
    add(f"links of {plan.link_mbit} Mbit/s: time of 8 receivers of that of 1, tcp", spread, "<=", 1.5, why=why)
    return made


def main() -> None:
    args = _common.arguments(__doc__ or "")
    plan = QUICK if args.quick else FULL
    conditions = _common.conditions(spare_bytes=SPARE_BYTES, available_bytes=_common.available_bytes())
    _actors.preload("torch", "robustrl.reconnect", "_transfers")
    largest, most = max(cell.size for cell in plan.cells), max(cell.receivers for cell in plan.cells)
    rows: list[dict[str, Any]] = []
    cluster: RayCluster | None = None
    conditions["ray"] = "not installed"
    if installed("ray"):
        try:
            cluster = RayCluster(max(2 * largest + 256 * MIB, 512 * MIB), most + 1)
            conditions["ray"] = "measured, in a network namespace of its own"
        except (RuntimeError, TimeoutError, EOFError, OSError) as error:
            conditions["ray"] = f"not started: {str(error).strip().splitlines()[-1]}"
    try:
        found = ways(cluster)
        for cell in plan.cells:
            print(f"{cell.size // MIB} MiB to {cell.receivers}", flush=True)
            rows += measure(cell, found)
    finally:
        if cluster is not None:
            cluster.close()
    rows += joiners(plan, ["auto", "tcp"])
    no_links = why_not()
    if not no_links:
        rows += limited_links(plan, ["tcp"] if args.quick or not installed("ucxx") else ["tcp", "ucx"])
    table = summary(rows)
    for line in table:
        print(
            f"{line['bytes'] // MIB:>5} MiB {line['receivers']} x {line['way']:<8}"
            f"{line['seconds'] * 1000:>10.1f} ms {line['gb_per_s']:>8.2f} GB/s"
        )
    conditions["nixl"] = "measured" if installed("nixl", "nixl_cu12") else "not installed"
    conditions["limited_links"] = no_links or "measured"
    _common.write(args.json, conditions, rows + table, claims(rows, plan, no_links))


if __name__ == "__main__":
    main()
