"""What every benchmark's result has in common: the conditions, the raw rows, and the claims with their verdicts."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal


def arguments(doc: str) -> argparse.Namespace:
    """``[--quick] --json FILE``, as every benchmark takes them."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of everything: within two minutes on 2 cores")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the result goes")
    return parser.parse_args()


def conditions(**more: Any) -> dict[str, Any]:
    """What the figures were measured under."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load_before": [round(each, 2) for each in os.getloadavg()],
        "python": platform.python_version(),
        "arguments": sys.argv[1:],
        **more,
    }


def available_bytes() -> int:
    """Memory that can be taken now without pushing anyone out."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def claim(
    name: str,
    value: float | None,
    unit: str,
    op: Literal[">=", "<="],
    goal: float,
    why: str = "",
) -> dict[str, Any]:
    """One claim. `value` is None where this run or this machine cannot decide it; `why` then says so."""
    met = None if value is None else value >= goal if op == ">=" else value <= goal
    made = {
        "name": name,
        "value": None if value is None else round(value, 4),
        "unit": unit,
        "op": op,
        "goal": goal,
        "met": met,
    }
    return made | ({"why": why} if why else {})


def write(path: Path, conditions: dict[str, Any], rows: list[dict[str, Any]], claims: list[dict[str, Any]]) -> None:
    """Writes the result and prints the claims."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"conditions": conditions, "rows": rows, "claims": claims}, indent=1) + "\n")
    for each in claims:
        verdict = {True: "met", False: "NOT MET", None: "undecided"}[each["met"]]
        why = f" ({each['why']})" if "why" in each else ""
        print(f"{verdict:>9}  {each['name']}: {each['value']} {each['unit']} {each['op']} {each['goal']}{why}")
