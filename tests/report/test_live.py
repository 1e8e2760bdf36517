from __future__ import annotations

import io

from rich.console import Console
from story import Story, realistic_run

from robustrl.events import MemberMoved, Restored
from robustrl.report import LiveState, LiveView
from robustrl.report.live import render


def told(story: Story) -> tuple[LiveState, list[str]]:
    state, lines = LiveState(), []
    for event in story.events:
        lines += state.apply(event)
    return state, lines


def test_notable_events_are_told_in_plain_words() -> None:
    story = Story().everyone_serves(1.0).starts("standby/0#1", 1.0, pid=77).fault("rollout/1#1", 4.0, step=4)
    story.verdict("rollout/1#1", 4.1).plan("rollout/1#1", 4.2, "promote standby/0#1 to rollout/1")
    story.starts("rollout/1#2", 4.5, 4.6, 5.0, pid=77)
    story.add(Restored(t=5.5, by="trainer/0#2", step=9, source="disk", seconds=0.214)).ends(6.0)
    _, lines = told(story)
    assert lines == [
        "job of 10 steps, 7 members, over tcp, policy role",
        "rollout/1#1 killed (SIGKILL) at step 4",
        "rollout/1#1 is dead in train: killed by SIGKILL",
        "plan for rollout/1: promote standby/0#1 to rollout/1",
        "standby/0 promoted to rollout/1#2",
        "rollout/1#2 serves again after 1.00 s",
        "trainer/0#2 resumed from step 9 (disk), 0.21 s",
        "job finished",
    ]


def test_the_state_follows_each_member() -> None:
    story = Story().everyone_serves(1.0).phase("trainer/0#1", 2.0, "train", 3).step_done(2, 2.0, reward=0.25)
    story.fault("rollout/0#1", 3.0, "stop", 3)
    state, _ = told(story)
    rows = {row.member: row for row in state.rows()}
    assert (rows["trainer/0"].phase, rows["trainer/0"].step, rows["trainer/0"].state) == ("train", 3, "serving")
    assert (rows["rollout/0"].state, rows["rollout/0"].last_words) == ("stopped", "stopped at step 3")
    assert (state.done, state.steps, state.reward, state.elapsed_s) == (2, 10, 0.25, 3.0)
    order = [row.member for row in state.rows()]
    assert (order[0], order[-1]) == ("trainer/0", "standby/0")


def test_late_words_of_an_older_incarnation_change_nothing() -> None:
    story = Story().everyone_serves(1.0).fault("rollout/0#1", 2.0).starts("rollout/0#2", 3.0, 3.0, 3.0)
    story.phase("rollout/0#1", 4.0, "generate", 1)
    story.add(MemberMoved(t=4.0, member="rollout/0", incarnation=1, before="serving", after="dead"))
    row = {row.member: row for row in told(story)[0].rows()}["rollout/0"]
    assert (row.incarnation, row.state, row.phase) == (2, "serving", "")


def test_without_a_terminal_each_notable_event_is_one_line() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, width=60)) as view:
        view.show(realistic_run())
    lines = out.getvalue().splitlines()
    assert len([line for line in lines if "killed (SIGKILL)" in line]) == 4
    assert len([line for line in lines if "serves again" in line]) == 5
    assert lines[-1].endswith("job finished")
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_whole_view_is_drawn() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, height=40, force_terminal=True)
    with LiveView(console) as view:
        view.show(realistic_run())
    text = out.getvalue()
    assert "14 of 14" in text
    assert "supervisor/0#2" in text


def test_an_empty_state_can_be_drawn() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(render(LiveState()))
