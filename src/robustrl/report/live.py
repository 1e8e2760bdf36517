"""The live view of a run: what each member does right now, and what happened, in plain words.

`LiveState` is pure: events go in, facts come out. `LiveView` draws it in place on a terminal, and prints one line a
notable event where there is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from robustrl.events import (
    Event,
    FaultInjected,
    JobEnded,
    JobStarted,
    MemberMoved,
    MemberReady,
    PhaseEntered,
    StepDone,
    VerdictReached,
)
from robustrl.report.ettr import Ettr, ettr
from robustrl.report.lives import failed, member_order
from robustrl.report.words import SIGNALS, in_words
from robustrl.roles import STANDBY

NEWS = 6
"""Lines of news that stay in view."""

STATE_STYLES = {
    "serving": "green",
    "killed": "bold red",
    "stopped": "bold red",
    "dead": "bold red",
    "hung": "bold red",
    "starting": "yellow",
    "pending_weights": "yellow",
    "standby": "cyan",
    "attached": "yellow",
    "reloaded": "yellow",
    "promoted": "cyan",
}


class MemberRow(msgspec.Struct):
    """What is known of a member now."""

    member: str
    incarnation: int = 0
    pid: int = 0
    state: str = ""
    phase: str = ""
    step: int = -1
    last_words: str = ""
    down_since: float | None = None


class LiveState:
    """Follows a run event by event. Keeps no clock: the time is that of the last event."""

    def __init__(self) -> None:
        self.members: dict[str, MemberRow] = {}
        self.news: deque[tuple[float, str]] = deque(maxlen=NEWS)
        self.steps = 0
        self.done = 0
        self.reward: float | None = None
        self.started: float | None = None
        self.now = 0.0
        self.outcome = ""
        self._events: list[Event] = []
        self._standbys: dict[int, str] = {}
        self._ettr = Ettr(0.0, 0.0, 0.0)
        self._ettr_at = float("-inf")

    def apply(self, event: Event) -> list[str]:
        """Takes one event in. Returns the lines of news that it made: none for everyday business."""
        self._events.append(event)
        self.now = max(self.now, event.t)
        lines = [text] if (text := in_words(event)) else []
        match event:
            case JobStarted():
                self.started = event.t if self.started is None else self.started
                self.steps = event.steps
                for member in event.members:
                    self._row(member)
            case JobEnded():
                self.outcome = event.outcome
            case MemberMoved():
                lines += self._moved(event)
            case PhaseEntered():
                row = self._row(event.member, event.incarnation)
                if event.incarnation == row.incarnation:
                    row.phase, row.step = event.phase, event.step
            case MemberReady():
                lines = self._ready(event, lines)
            case FaultInjected():
                row = self._row(event.member, event.incarnation)
                row.state = SIGNALS.get(event.kind, event.kind).split()[0]
                row.last_words = f"{row.state} at step {event.step}" if event.step >= 0 else row.state
                row.phase, row.down_since = "", event.t
            case VerdictReached() if failed(event):
                row = self._row(event.member, event.incarnation)
                if event.incarnation == row.incarnation:
                    row.state, row.phase = event.verdict, ""
                row.down_since = event.t if row.down_since is None else row.down_since
                row.last_words = f"{event.verdict}: {event.evidence or event.signal}"
            case StepDone():
                self.done = event.step
                self.reward = event.metrics.get("reward", self.reward)
            case _:
                pass
        self.news.extend((event.t, line) for line in lines)
        return lines

    @property
    def elapsed_s(self) -> float:
        return self.now - self.started if self.started is not None else 0.0

    def ettr(self) -> Ettr:
        """So far; computed anew once a second of the run at the most, as it reads the whole log."""
        if self.now - self._ettr_at >= 1.0 or self.outcome:
            self._ettr, self._ettr_at = ettr(self._events), self.now
        return self._ettr

    def rows(self) -> list[MemberRow]:
        return sorted(self.members.values(), key=lambda row: member_order(row.member))

    def _row(self, member: str, incarnation: int = 0) -> MemberRow:
        row = self.members.setdefault(member, MemberRow(member))
        if incarnation > row.incarnation:
            row.incarnation, row.phase, row.pid, row.step = incarnation, "", 0, -1
            row.state = "starting"
        return row

    def _moved(self, event: MemberMoved) -> list[str]:
        row = self._row(event.member, event.incarnation)
        if event.incarnation < row.incarnation:
            return []
        row.state = event.after
        if not event.pid or event.pid == row.pid:
            return []
        row.pid = event.pid
        if row.member.startswith(f"{STANDBY}/"):
            self._standbys[event.pid] = row.member
        elif standby := self._standbys.pop(event.pid, ""):
            was = self.members[standby]
            if was.pid == event.pid:
                was.state, was.phase = "promoted", ""
                was.last_words = f"became {event.member}#{event.incarnation}"
            return [f"{standby} promoted to {event.member}#{event.incarnation}"]
        return []

    def _ready(self, event: MemberReady, lines: list[str]) -> list[str]:
        row = self._row(event.member, event.incarnation)
        if event.incarnation < row.incarnation:
            return []
        row.state = event.milestone
        if event.milestone != "serving":
            return lines
        if row.down_since is None:
            # The first start of all members is no news; a return is.
            return lines if event.incarnation > 1 else []
        back = f"serves again after {event.t - row.down_since:.2f} s"
        row.last_words, row.down_since = back, None
        return [f"{event.member}#{event.incarnation} {back}"]


def render(state: LiveState) -> RenderableType:
    """The whole view: a header, the members, the news."""
    reward = "-" if state.reward is None else f"{state.reward:.3f}"
    ratios = state.ettr()
    header = Text()
    header.append(f"step {state.done} of {state.steps}", style="bold")
    header.append(f"   reward {reward}   ETTR {ratios.strict:.1%} strict, {ratios.paper:.1%} paper")
    header.append(f"   {state.elapsed_s:.0f} s")
    if state.outcome:
        header.append(f"   {state.outcome}", style="bold green" if state.outcome == "finished" else "bold red")
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for name, width in (("member", 14), ("pid", 8), ("state", 16), ("phase", 16)):
        table.add_column(name, min_width=width, no_wrap=True)
    table.add_column("last words", no_wrap=True, overflow="ellipsis")
    for row in state.rows():
        phase = f"{row.phase} {row.step}" if row.phase and row.step >= 0 else row.phase
        table.add_row(
            f"{row.member}#{row.incarnation}" if row.incarnation else row.member,
            str(row.pid) if row.pid else "",
            Text(row.state, style=STATE_STYLES.get(row.state, "")),
            phase,
            Text(row.last_words, style="dim"),
        )
    start = state.started or 0.0
    news = Text("\n").join(
        Text(f"{t - start:7.1f} s  ", style="dim") + Text(line, style=_style(line)) for t, line in state.news
    )
    news.no_wrap, news.overflow = True, "ellipsis"
    return Group(header, Text(), table, Text(), news)


def _style(line: str) -> str:
    if any(word in line for word in SIGNALS.values()):
        return "red"
    if line.startswith("alarm"):
        return "yellow"
    return "green" if "serves" in line or "resumed" in line else ""


class LiveView:
    """Shows a run while it goes. On a terminal in place, elsewhere one line a notable event.

    Use as a context manager; feed it with `show`. Drawing happens in the calling thread.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.state = LiveState()
        self._console = console or Console()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(render(self.state), console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(render(self.state), refresh=True)
            self._live.__exit__(kind, error, trace)
            self._live = None

    def show(self, events: Iterable[Event]) -> None:
        """Takes in what the log has new, and draws."""
        for event in events:
            lines = self.state.apply(event)
            if self._live is None:
                for line in lines:
                    self._console.print(
                        f"{self.state.elapsed_s:7.1f} s  {line}", markup=False, highlight=False, soft_wrap=True
                    )
        if self._live is not None:
            self._live.update(render(self.state), refresh=True)
