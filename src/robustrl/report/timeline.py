"""A run as a picture: members as lanes, phases as colours, faults and recoveries where they happened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from robustrl.errors import MissingDependencyError
from robustrl.events import Event, FaultInjected, JobStarted, VersionPublished, of_kind
from robustrl.report.ettr import ettr
from robustrl.report.lives import Life, PhaseSpan, job_span, last_steps, members_of, read_lives
from robustrl.report.recovery import Recovery, recoveries
from robustrl.roles import MANAGER, STANDBY, SUPERVISOR, Phase

PHASE_COLOURS = {
    "init": "#d8c9a8",
    "generate": "#7fb3d5",
    "tool": "#a99fd0",
    "wait": "#dfe5ea",
    "train": "#2f6690",
    "sync": "#e0a458",
    "checkpoint": "#81a88d",
    "evaluate": "#b57ba6",
    "idle": "#eef1f4",
}
OTHER_COLOUR = "#b8bec5"
SERVING_COLOUR = "#cfd8dc"
"""A member that serves and declares no phases."""
STANDBY_COLOUR = "#e6ecd9"
DOWN_COLOUR = "#b3261e"
BACK_COLOUR = "#2e7d32"
INK = "#37474f"

WIDTH, HEIGHT, DPI = 1600, 700, 100
LANE = 0.66
"""A bar's share of its lane's height."""


def draw_timeline(events: Sequence[Event], path: Path | str, title: str = "") -> None:
    """Draws a PNG of 1600 x 700 pixels.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "a timeline needs matplotlib", why=str(error), do="Install the extra: pip install 'robustrl[report]'."
        ) from error
    lives = read_lives(events)
    start, end = job_span(events)
    rows = recoveries(events)
    members = members_of(events, lives)
    lanes = {member: i for i, member in enumerate(members)}

    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        2, 1, height_ratios=[max(3, len(members)), 1.5], hspace=0.09, left=0.085, right=0.985, top=0.85, bottom=0.075
    )
    axes = figure.add_subplot(grid[0])
    below = figure.add_subplot(grid[1], sharex=axes)

    used = _draw_lives(axes, lives, lanes, start, end)
    _draw_downtime(axes, lives, rows, lanes, start=start, end=end)
    _draw_promotions(axes, lives, lanes, start)
    struck = _draw_faults(axes, events, rows, lanes, start)
    versions = _draw_versions(axes, events, lanes, start)
    _style_lanes(axes, members, end - start)
    _draw_reward(below, events, start, end)
    _legend(figure, used, struck, recovered=any(row.mttr_s is not None for row in rows), versions=versions)
    figure.text(0.012, 0.955, title or _title(events), fontsize=13, color=INK, fontweight="bold", va="center")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def _title(events: Sequence[Event]) -> str:
    job = next(of_kind(events, JobStarted), None)
    start, end = job_span(events)
    ratios = ettr(events)
    steps = len(last_steps(events))
    words = [f"{steps} steps in {end - start:.0f} s", f"ETTR {ratios.strict:.1%} strict, {ratios.paper:.1%} paper"]
    if job is not None:
        words = [f"policy {job.policy}", *words, f"weights over {job.transport}"]
    return "   ·   ".join(words)


def _draw_lives(axes: Any, lives: Sequence[Life], lanes: dict[str, int], start: float, end: float) -> list[str]:
    """Bars of what each member did. Returns the names of what was drawn, for the legend."""
    bars: dict[str, list[tuple[float, float, int]]] = {}
    for life in lives:
        lane = lanes[life.member]
        until = end if life.ended is None else life.ended
        if life.role == STANDBY:
            ready = life.began if life.attached is None else life.attached
            bars.setdefault("standing by", []).append((min(ready, until), until, lane))
            continue
        if not life.spans:
            since = life.serving if life.serving is not None else life.attached
            if since is not None:
                bars.setdefault("serving", []).append((since, until, lane))
            continue
        for span in _merged(life.spans):
            # A server that waits for calls says that it is idle, and is at work all the same.
            resting = span.phase == Phase.IDLE and life.role in (MANAGER, SUPERVISOR)
            bars.setdefault("serving" if resting else span.phase, []).append((span.start, span.end, lane))
    for name, spans in bars.items():
        colour = _colour(name)
        for left, right, lane in spans:
            axes.barh(lane, right - left, left=left - start, height=LANE, color=colour, linewidth=0, zorder=2)
    order = [*PHASE_COLOURS, "serving", "standing by"]
    return sorted(bars, key=lambda name: order.index(name) if name in order else len(order))


def _colour(name: str) -> str:
    return PHASE_COLOURS.get(name, {"serving": SERVING_COLOUR, "standing by": STANDBY_COLOUR}.get(name, OTHER_COLOUR))


def _merged(spans: Sequence[PhaseSpan]) -> list[PhaseSpan]:
    """Neighbours of one phase as one bar: no hairlines between them, and fewer to draw."""
    merged: list[PhaseSpan] = []
    for span in spans:
        if merged and merged[-1].phase == span.phase and merged[-1].end >= span.start:
            merged[-1] = PhaseSpan(merged[-1].start, span.end, span.phase, span.step)
        else:
            merged.append(span)
    return merged


def _draw_downtime(
    axes: Any, lives: Sequence[Life], rows: Sequence[Recovery], lanes: dict[str, int], *, start: float, end: float
) -> None:
    """From each end of a life to the next one's serving: hatched, over whatever the start-up says of its phases."""
    for life in lives:
        if life.ended is None or life.promoted_to or (life.role == STANDBY and life.fault is None):
            continue
        later = [other for other in lives if other.member == life.member and other.incarnation > life.incarnation]
        # Between two failures without a life in service the second one's own bar takes over.
        ends = [t for other in later for t in (other.serving, other.ended) if t is not None]
        if life.role == STANDBY:
            ends = [other.began if other.attached is None else other.attached for other in later]
        until = max(life.ended, min([*ends, end]))
        axes.barh(
            lanes[life.member],
            until - life.ended,
            left=life.ended - start,
            height=LANE,
            facecolor="#fdf3f2",
            edgecolor="#dba7a3",
            hatch="//////",
            linewidth=0,
            zorder=3,
        )
    lasting = end - start
    for row in rows:
        if row.mttr_s is None:
            continue
        lane, t = lanes[row.member], row.t + row.mttr_s - start
        axes.plot([t, t], [lane - LANE / 2, lane + LANE / 2], color=BACK_COLOUR, linewidth=1.8, zorder=5)
        axes.annotate(
            f"{row.mttr_s:.2f} s" if row.mttr_s < 10 else f"{row.mttr_s:.1f} s",
            (t, lane - LANE / 2),
            xytext=(3, 1.5) if t < lasting * 0.95 else (-3, 1.5),
            textcoords="offset points",
            ha="left" if t < lasting * 0.95 else "right",
            va="bottom",
            fontsize=8,
            color=BACK_COLOUR,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            zorder=6,
        )


def _draw_promotions(axes: Any, lives: Sequence[Life], lanes: dict[str, int], start: float) -> None:
    """An arrow from the standby's lane to the place that its process took."""
    by_identity = {life.identity: life for life in lives}
    for life in lives:
        if not life.promoted_to or life.ended is None:
            continue
        target = by_identity[life.promoted_to]
        t = life.ended - start
        axes.annotate(
            "",
            xy=(t, lanes[target.member] + LANE / 2),
            xytext=(t, lanes[life.member] - LANE / 2),
            arrowprops={"arrowstyle": "-|>", "color": BACK_COLOUR, "linewidth": 1.1, "alpha": 0.75},
            zorder=4,
        )


def _draw_faults(
    axes: Any, events: Sequence[Event], rows: Sequence[Recovery], lanes: dict[str, int], start: float
) -> list[str]:
    """Red markers; failures that nobody injected are marked too. Returns the kinds that were drawn."""
    marks = [(fault.t, fault.member, fault.kind) for fault in of_kind(events, FaultInjected)]
    known = {(t, member) for t, member, _ in marks}
    marks += [(row.t, row.member, "failure") for row in rows if (row.t, row.member) not in known]
    for t, member, kind in marks:
        axes.plot(
            t - start,
            lanes[member],
            marker=_marker(kind),
            markersize=9.5,
            color=DOWN_COLOUR,
            markeredgecolor="white",
            markeredgewidth=0.9,
            linestyle="none",
            zorder=7,
            clip_on=False,
        )
    return sorted({kind for _, _, kind in marks})


def _marker(kind: str) -> str:
    return {"kill": "X", "stop": "s", "term": "D"}.get(kind, "o")


def _draw_versions(axes: Any, events: Sequence[Event], lanes: dict[str, int], start: float) -> bool:
    """A small tick above the trainer's lane for each weight version that was published."""
    times = [event.t - start for event in of_kind(events, VersionPublished)]
    if not times or not lanes:
        return False
    axes.vlines(times, -0.5, -0.5 + 0.13, color=INK, linewidth=0.9, alpha=0.8, zorder=4)
    return True


def _style_lanes(axes: Any, members: Sequence[str], seconds: float) -> None:
    axes.set_ylim(len(members) - 0.45, -0.55)
    axes.set_xlim(0, max(seconds, 1e-3))
    axes.set_yticks(range(len(members)), [name[:-2] if _alone(name, members) else name for name in members])
    axes.tick_params(axis="y", length=0, labelsize=10.5, labelcolor=INK, pad=6)
    axes.tick_params(axis="x", length=0, labelbottom=False)
    axes.grid(axis="x", color="#eceff1", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _alone(name: str, members: Sequence[str]) -> bool:
    """Whether the role has this one member: then the number says nothing."""
    role = name.partition("/")[0]
    return name.endswith("/0") and sum(member.startswith(f"{role}/") for member in members) == 1


def _draw_reward(axes: Any, events: Sequence[Event], start: float, end: float) -> None:
    done = [step for step in last_steps(events).values() if "reward" in step.metrics]
    times, rewards = [step.t - start for step in done], [step.metrics["reward"] for step in done]
    if done:
        axes.plot(times, rewards, color="#90a4ae", linewidth=0.8, alpha=0.8, zorder=2)
        width = max(1, len(rewards) // 12)
        smooth = [
            sum(rewards[max(0, i - width) : i + 1]) / len(rewards[max(0, i - width) : i + 1]) for i in range(len(done))
        ]
        axes.plot(times, smooth, color=PHASE_COLOURS["train"], linewidth=1.7, zorder=3)
        axes.margins(y=0.15)
    axes.set_ylabel("reward", color=INK, fontsize=10, labelpad=8)
    axes.set_xlabel("seconds since the job started", color=INK, fontsize=10)
    axes.tick_params(labelsize=9, labelcolor=INK, color="#b0bec5")
    axes.locator_params(axis="y", nbins=3)
    axes.grid(color="#eceff1", linewidth=0.8, zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b0bec5")


def _legend(figure: Any, used: Sequence[str], struck: Sequence[str], *, recovered: bool, versions: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = {"kill": "killed (SIGKILL)", "stop": "stopped (SIGSTOP)", "term": "told to end (SIGTERM)"}
    handles: list[Any] = [Patch(facecolor=_colour(name), label=name) for name in used]
    if struck:
        handles.append(Patch(facecolor="#fdf3f2", edgecolor="#dba7a3", hatch="//////", linewidth=0, label="down"))
    handles += [
        Line2D(
            [], [], marker=_marker(kind), color=DOWN_COLOUR, linestyle="none", markersize=8, label=names.get(kind, kind)
        )
        for kind in struck
    ]
    if recovered:
        handles.append(
            Line2D(
                [],
                [],
                marker="|",
                color=BACK_COLOUR,
                linestyle="none",
                markersize=11,
                markeredgewidth=2,
                label="serves again",
            )
        )
    if versions:
        handles.append(
            Line2D(
                [], [], marker="|", color=INK, linestyle="none", markersize=6, markeredgewidth=1, label="weight version"
            )
        )
    if handles:
        figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(0.005, 0.935),
            ncols=len(handles),
            frameon=False,
            fontsize=9,
            labelcolor=INK,
            handlelength=1.3,
            handletextpad=0.45,
            columnspacing=1.25,
        )
