"""Summaries as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from robustrl.report.summary import Compared, Summary


def summary_tables(summary: Summary) -> RenderableType:
    """A run's figures and its recoveries."""
    figures = Table(box=None, show_header=False, pad_edge=False)
    figures.add_column(style="dim")
    figures.add_column()
    reward = f"{_number(summary.reward_first)} -> {_number(summary.reward_last)}"
    zero = (
        ("lost trajectories", summary.lost_trajectories),
        ("used twice", summary.duplicated_trajectories),
        ("bystanders restarted", summary.bystander_restarts),
    )
    figures.add_row("outcome", Text(summary.outcome, style="green" if summary.outcome == "finished" else "bold red"))
    figures.add_row("policy, transport, seed", f"{summary.policy}, {summary.transport}, {summary.seed}")
    figures.add_row("steps", f"{summary.steps} in {summary.wall_s:.1f} s")
    figures.add_row("reward", reward)
    figures.add_row("ETTR", f"{summary.ettr_strict:.1%} strict, {summary.ettr_paper:.1%} as the paper counts")
    for name, count in zero:
        figures.add_row(name, Text(str(count), style="green" if count == 0 else "bold red"))
    figures.add_row("tokens generated again", str(summary.regenerated_tokens))
    figures.add_row("weights at the end", summary.final_digest or "-")
    left = [f"{kind.replace('_', ' ')}: {', '.join(found)}" for kind, found in summary.leftovers.items() if found]
    figures.add_row("left behind", Text("; ".join(left) or "nothing", style="bold red" if left else "green"))
    parts: list[RenderableType] = [figures]
    if summary.recoveries:
        parts += [Text(), recovery_table(summary)]
    return Group(*parts)


def recovery_table(summary: Summary) -> Table:
    """One row a failure; seconds."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("failure", "step"):
        table.add_column(name)
    for name in ("back after", "detect", "plan", "restart", "reload", "reconnect"):
        table.add_column(name, justify="right")
    for row in summary.recoveries:
        times = (row.mttr_s, row.detect_s, row.plan_s, row.restart_s, row.reload_s, row.reconnect_s)
        cells = ["-" if t is None else f"{t:.3f} s" for t in times]
        if row.mttr_s is None:
            cells[0] = "never"
        table.add_row(f"{row.kind} {row.member}", str(row.step), *cells)
    return table


def compare_table(rows: Iterable[Compared]) -> Table:
    """Two runs side by side."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in ("a", "b", "a / b"):
        table.add_column(name, justify="right")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.name.replace("_", " "), _number(row.a), _number(row.b), ratio)
    return table


def _number(value: float | int | str | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
