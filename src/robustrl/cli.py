"""The command line: ``robustrl demo``, ``robustrl run``, ``robustrl report`` and ``robustrl ledger``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console

from robustrl import ledger_commands
from robustrl.errors import ConfigError, MissingDependencyError, RobustError

app = typer.Typer(
    name="robustrl",
    help="Role-isolated fault tolerance for RL post-training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(ledger_commands.commands)

WRONG_INPUT = 2
FAILED = 1


@app.callback()
def _root() -> None:
    """Role-isolated fault tolerance for RL post-training."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 40,
    rollouts: Annotated[int, typer.Option(help="Rollout processes.")] = 3,
    faults: Annotated[
        str | None,
        typer.Option(
            help="What to break, e.g. 'kill rollout/1 at step 4; stop rollout/0 at step 8; kill trainer at step 10'."
        ),
    ] = None,
    no_faults: Annotated[bool, typer.Option("--no-faults", help="Break nothing.")] = False,
    transport: Annotated[
        Literal["auto", "ucx", "shm", "tcp", "nixl"] | None,
        typer.Option(help="How weights travel; default: ucx where it is installed, else tcp."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Names the prompts and every random draw.")] = 0,
    staleness: Annotated[int, typer.Option(help="Steps that generating weights may be behind.")] = 1,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Fixed staleness: equal runs end equal.")
    ] = False,
    policy: Annotated[
        Literal["role", "whole-job"], typer.Option(help="What to restart: the failed role, or everything.")
    ] = "role",
    compare: Annotated[bool, typer.Option("--compare", help="Run both policies with the same faults.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The supervisor's port; 0 takes a free one.")] = 0,
    report: Annotated[Path, typer.Option(help="Where summary.json and timeline.png go.")] = Path("report"),
) -> None:
    """Run the reference job, kill its processes on purpose, and show that only the failed role is brought back."""
    from robustrl.demo import DemoOptions, check_options, run_demo
    from robustrl.report.summary import compare as side_by_side
    from robustrl.report.text import compare_table, summary_tables

    if no_faults and faults is not None:
        raise ConfigError("--no-faults and --faults contradict each other")
    if compare and deterministic:
        raise ConfigError("--compare and --deterministic contradict each other", why="whole-job restarts are not exact")
    options = DemoOptions(
        steps=steps,
        rollouts=rollouts,
        faults="" if no_faults else faults,
        transport=transport,
        seed=seed,
        staleness=staleness,
        deterministic=deterministic,
        policy=policy,
        port=port,
        report=report,
    )
    console = Console()
    if not compare:
        summary = run_demo(check_options(options), console)
        console.print(summary_tables(summary))
        console.print(f"written: {report / 'summary.json'}, {report / 'timeline.png'}")
        raise typer.Exit(0 if summary.clean else FAILED)
    both = []
    for name in ("role", "whole-job"):
        console.rule(f"policy {name}")
        one = msgspec.structs.replace(options, policy=name, report=report / name)
        both.append(run_demo(check_options(one), console))
    console.print(compare_table(side_by_side(both[0], both[1])))
    console.print(f"written: {report / 'role'}, {report / 'whole-job'}")
    raise typer.Exit(0 if both[0].clean else FAILED)


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    command: Annotated[list[str], typer.Argument(help="-- python -m MODULE ARGS, as you would run it without us.")],
) -> None:
    """Run a framework's own command with robustrl attached.

    Flags are given among the framework's, as robustrl.restart.budget=5 or --robustrl.restart.budget 5: any setting of
    RobustConfig, and robustrl.run (the run's folder), robustrl.config (a file), robustrl.enable (true).
    """
    from robustrl.attach.launch import launch

    raise typer.Exit(launch(command))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder, or an events.jsonl.")],
    to: Annotated[Path, typer.Option(help="The picture to write.")] = Path("timeline.png"),
) -> None:
    """Draw the timeline of a run from its event log."""
    from robustrl import events
    from robustrl.report.timeline import draw_timeline

    path = run / "events.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise ConfigError(f"there is no event log at {path}")
    draw_timeline(events.read_events(path), to)
    Console().print(f"written: {to}")


def main() -> None:
    """The entry point: wrong input ends with one message and exit code 2, a failed job with 1."""
    # A scheduler's request to stop unwinds like Ctrl-C: the job is ended in order, and nothing is left.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        app()
    except (ConfigError, MissingDependencyError) as error:
        print(f"robustrl: {error}", file=sys.stderr)
        sys.exit(WRONG_INPUT)
    except RobustError as error:
        print(f"robustrl: {error}", file=sys.stderr)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
