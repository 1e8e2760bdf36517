"""``robustrl ledger``: look at a ledger file. Safe while a job is using it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from robustrl.persist import reading

commands = typer.Typer(name="ledger", help="Look at the trajectory ledger of a run.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="The ledger's file, RUN/ledger.db, or the folder of the run.")]


@commands.command()
def show(path: File) -> None:
    """Count groups, trajectories and tokens, and say where the optimizer stands."""
    found = reading.summarize(_file(path))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("batches", f"{found.groups_per_batch} prompts x {found.samples_per_prompt} answers")
    table.add_row("handed out", f"{found.groups} prompts")
    for state, count in found.states.items():
        table.add_row(f"  {state}", str(count))
    table.add_row("tokens saved", f"{found.tokens:,}")
    table.add_row("consumed", f"up to step {found.consumed}")
    table.add_row("committed", f"up to step {found.committed}")
    if found.compacted:
        table.add_row("compacted", f"up to step {found.compacted}")
    for outcome, count in found.failures.items():
        table.add_row(f"attempts {outcome}", str(count))
    for owner, tokens in found.owners.items():
        table.add_row(f"by {owner}", f"{tokens:,} tokens")
    Console().print(table)


@commands.command()
def verify(path: File) -> None:
    """Check every row, and that each trajectory is in one step and whole. Exit 1 where something is wrong."""
    problems = reading.verify(_file(path))
    for problem in problems:
        print(problem)
    if problems:
        print(f"{len(problems)} problems in {_file(path)}", file=sys.stderr)
        raise typer.Exit(1)
    print(f"{_file(path)} is whole")


@commands.command()
def export(path: File) -> None:
    """Write each trajectory as a line of JSON to standard output."""
    encoder = msgspec.json.Encoder()
    for trajectory in reading.export(_file(path)):
        sys.stdout.buffer.write(encoder.encode(trajectory) + b"\n")


def _file(path: Path) -> Path:
    return path / "ledger.db" if path.is_dir() else path
