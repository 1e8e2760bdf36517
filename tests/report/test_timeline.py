from __future__ import annotations

import sys
from pathlib import Path

import pytest
from story import Story, realistic_run, shifted

from robustrl.errors import MissingDependencyError
from robustrl.report import draw_timeline


def size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def test_a_run_becomes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_timeline(shifted(realistic_run(), 1.7e9), tmp_path / "report" / "timeline.png")
    assert size(tmp_path / "report" / "timeline.png") == (1600, 700)


@pytest.mark.parametrize(
    "story",
    [Story(members=()), Story(), Story().fault("rollout/0#1", 1.0, "term"), Story().verdict("trainer/0#1", 1.0)],
    ids=["nobody", "nothing", "fault before start", "failure before start"],
)
def test_a_log_that_tells_next_to_nothing_can_be_drawn(story: Story, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_timeline(story.events, tmp_path / "timeline.png")
    assert size(tmp_path / "timeline.png") == (1600, 700)


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"robustrl\[report\]"):
        draw_timeline(realistic_run(), tmp_path / "timeline.png")
