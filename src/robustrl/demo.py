"""The demo: runs the reference job, breaks it on purpose, and reports what was lost. ``robustrl demo``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec
from rich.console import Console

from robustrl import events
from robustrl.config import DetectConfig, PersistConfig, ReconnectConfig, RestartConfig, RobustConfig
from robustrl.errors import ConfigError, JobFailedError, MissingDependencyError
from robustrl.inject.injector import Injector, Target
from robustrl.inject.schedule import Fault, check, default_schedule, parse, to_text
from robustrl.report.leftovers import leftovers
from robustrl.report.live import LiveView
from robustrl.report.summary import Summary, summarize, write_summary
from robustrl.report.timeline import draw_timeline
from robustrl.restart import Journal
from robustrl.roles import SUPERVISOR, Member
from robustrl.runtime.launcher import Launcher, new_run_dir

Transport = Literal["auto", "ucx", "shm", "tcp", "nixl"]
POLL_S = 0.01
LONGEST_RUN_S = 1800.0


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a user can ask of the demo."""

    steps: int = 40
    rollouts: int = 3
    faults: str | None = None
    """A schedule (see `robustrl.inject.schedule`); None is the default one, empty is none."""
    transport: Transport | None = None
    """None is ucx where it is installed, else tcp."""
    seed: int = 0
    staleness: int = 1
    deterministic: bool = False
    policy: Literal["role", "whole-job"] = "role"
    port: int = 0
    report: Path = Path("report")


class Checked(msgspec.Struct, frozen=True):
    """Options that were found to be possible."""

    options: DemoOptions
    faults: tuple[Fault, ...]
    transport: Transport
    config: RobustConfig


def check_options(options: DemoOptions) -> Checked:
    """Refuses what cannot be run, before anything is started. Raises ConfigError or MissingDependencyError."""
    if options.steps < 1:
        raise ConfigError("--steps must be at least 1", why=f"it is {options.steps}")
    if options.rollouts < 1:
        raise ConfigError("--rollouts must be at least 1", why=f"it is {options.rollouts}")
    if options.deterministic and options.policy == "whole-job":
        raise ConfigError(
            "--deterministic and --policy whole-job contradict each other",
            why="a whole-job restart throws answers away and generates them again with other weights",
        )
    members = [Member(SUPERVISOR), Member("manager"), Member("trainer"), Member("standby")]
    members += [Member("rollout", index) for index in range(options.rollouts)]
    faults = default_schedule(options.steps, options.rollouts) if options.faults is None else parse(options.faults)
    check(faults, members, options.steps)
    config = RobustConfig(
        detect=DetectConfig(heartbeat_s=0.2, silence_s=2.0, start_s=60.0),
        persist=PersistConfig(staleness=options.staleness, exact_staleness=options.deterministic),
        # Exact staleness needs older versions, and each failover of the trainer adds one to hold.
        reconnect=ReconnectConfig(transport=_transport(options.transport), keep_versions=options.staleness + 3),
        restart=RestartConfig(policy=options.policy),
    )
    config.check()
    _writable(options.report)
    return Checked(options, faults, config.reconnect.transport, config)


def _transport(wanted: Transport | None) -> Transport:
    have_ucx = importlib.util.find_spec("ucxx") is not None
    if wanted == "ucx" and not have_ucx:
        raise MissingDependencyError("--transport ucx needs ucxx", do="pip install 'robustrl[ucx]', or --transport tcp")
    if wanted == "nixl" and importlib.util.find_spec("nixl_cu12") is None:
        raise MissingDependencyError("--transport nixl needs nixl", do="pip install 'robustrl[nixl]'")
    return wanted or ("ucx" if have_ucx else "tcp")


def _writable(folder: Path) -> None:
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"the report folder {folder} cannot be written", why=error.strerror or str(error)) from error


def reference_job() -> ModuleType:
    """The package of the reference job, from the wheel or from the checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "_examples", here.parents[1] / "examples"):
        if (folder / "tiny_grpo" / "job.py").exists():
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
            try:
                return importlib.import_module("tiny_grpo.job")
            except ModuleNotFoundError as error:
                raise MissingDependencyError(
                    f"the reference job needs {error.name}", do="pip install 'robustrl[torch]'"
                ) from error
    raise ConfigError("the reference job is not installed", do="Run the demo from a checkout or a full wheel.")


def run_demo(checked: Checked, console: Console) -> Summary:
    """Runs the job to its end and writes the report. Raises JobFailedError when the job was given up."""
    options = checked.options
    job = reference_job()
    settings = importlib.import_module("tiny_grpo.settings").Settings(seed=options.seed, steps=options.steps)
    weights = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "robustrl" / "tiny_grpo_warm.pt"
    run_dir = new_run_dir(options.report / "runs")
    _forget_old_runs(run_dir.parent, keep=4)
    timed = [fault for fault in checked.faults if fault.moment]
    spec = job.describe(
        settings,
        weights,
        checked.config,
        rollouts=options.rollouts,
        standbys=0 if options.policy == "whole-job" else 1,
        prefix=("-m", "robustrl.inject.member") if timed else (),
        env={"ROBUSTRL_FAULTS": to_text(timed)} if timed else {},
    )
    launcher = Launcher(spec, run_dir, port=options.port)
    members = tuple(str(member) for member in spec.members())
    console.print(f"run folder: {run_dir}", soft_wrap=True)
    launcher.log.emit(
        events.JobStarted(
            policy=options.policy,
            transport=checked.transport,
            steps=options.steps,
            members=(*members, f"{SUPERVISOR}/0"),
            seed=options.seed,
        )
    )
    try:
        _warm_up(settings, weights, console)
        launcher.start()
        not_struck = _attend(launcher, checked, console)
    finally:
        launcher.close()
    return _report(launcher, checked, settings, not_struck, console)


def _warm_up(settings: Any, weights: Path, console: Console) -> None:
    """Makes the model that post-training starts from, unless it is kept from an earlier run."""
    warmup = importlib.import_module("tiny_grpo.warmup")
    begun = time.monotonic()
    with (
        console.status("supervised warm-up of the model (first run only)")
        if console.is_terminal
        else contextlib.nullcontext()
    ):
        made = warmup.ensure(weights, settings)
    if made:
        console.print(f"warm-up of the model took {time.monotonic() - begun:.1f} s; it is kept in {weights}")


def _forget_old_runs(folder: Path, keep: int) -> None:
    if folder.is_dir():
        for old in sorted(entry for entry in folder.iterdir() if entry.is_dir())[:-keep]:
            shutil.rmtree(old, ignore_errors=True)


def _attend(launcher: Launcher, checked: Checked, console: Console) -> tuple[Fault, ...]:
    """Looks after the launcher, injects the faults and shows what happens. Returns the faults that never struck."""
    reader = events.EventReader(launcher.events)
    targets = _targets(launcher)
    injector = Injector(checked.faults, targets, launcher.log.emit)
    deadline = time.monotonic() + LONGEST_RUN_S
    drawn_at = 0.0
    fresh: list[events.Event] = []
    with LiveView(console) as view:
        while True:
            state = launcher.poll()
            new = reader.poll()
            injector.poll(new)
            fresh += new
            now = time.monotonic()
            if now - drawn_at > 0.25 or state is not None:
                view.show(fresh)
                fresh, drawn_at = [], now
            if state is not None:
                view.show(reader.poll())
                if state.outcome != "finished":
                    raise JobFailedError(
                        "the job was given up", why=state.cause, do=f"Its logs are in {launcher.run_dir / 'logs'}."
                    )
                return injector.pending
            if now > deadline:
                launcher.stop()
                raise JobFailedError(f"the job did not end within {LONGEST_RUN_S:.0f} s")
            time.sleep(POLL_S)


def _targets(launcher: Launcher) -> Callable[[], dict[str, Target]]:
    """The job's processes now: the members from the supervisor's journal, the supervisor from the launcher."""

    def targets() -> dict[str, Target]:
        journal = Journal(launcher.run_dir / "supervisor.db")
        try:
            found = {
                str(r.member): Target(r.incarnation, r.process.pid, r.process.started)
                for r in journal.records()
                if r.living and r.process is not None
            }
        finally:
            journal.close()
        if launcher.supervisor is not None:
            found[f"{SUPERVISOR}/0"] = Target(
                launcher.incarnation, launcher.supervisor.pid, launcher.supervisor.started
            )
        return found

    return targets


def _report(
    launcher: Launcher, checked: Checked, settings: Any, not_struck: tuple[Fault, ...], console: Console
) -> Summary:
    log = events.read_events(launcher.events)
    left = leftovers(
        launcher.run_dir,
        [(p.pid, p.started) for p in launcher.processes],
        ports=[launcher.address.port],
        shm_prefix=f"robustrl-{launcher.run_dir.name}",
    )
    summary = summarize(
        log,
        prompts_per_step=settings.prompts_per_step,
        samples_per_prompt=settings.samples_per_prompt,
        leftovers=left,
    )
    folder = checked.options.report
    write_summary(summary, folder / "summary.json")
    with contextlib.suppress(MissingDependencyError):
        draw_timeline(log, folder / "timeline.png")
    for fault in not_struck:
        console.print(f"[yellow]the fault '{fault}' found no member to strike[/yellow]")
    return summary
