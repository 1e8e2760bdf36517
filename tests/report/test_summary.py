from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from story import Story, realistic_run

from robustrl.report import compare, compare_table, read_summary, summarize, summary_tables, write_summary
from robustrl.report.summary import Summary, exactly_once

KEYS = {
    "steps", "wall_s", "reward_first", "reward_last", "ettr_paper", "ettr_strict", "lost_trajectories",
    "duplicated_trajectories", "regenerated_tokens", "faults", "recoveries", "bystander_restarts", "final_digest",
    "leftovers", "policy", "transport", "seed", "outcome",
}  # fmt: skip
PARTS = {"role", "member", "kind", "step", "mttr_s", "detect_s", "plan_s", "restart_s", "reload_s", "reconnect_s"}


def batch(step: int, prompts: int = 2, samples: int = 2) -> tuple[str, ...]:
    first = (step - 1) * prompts
    return tuple(f"{prompt}/{sample}" for prompt in range(first, first + prompts) for sample in range(samples))


def summary_of(story: Story) -> Summary:
    return summarize(story.events, prompts_per_step=2, samples_per_prompt=2)


def test_every_id_once_is_neither_lost_nor_duplicated() -> None:
    story = Story().batch(1, 1.0, batch(1)).batch(2, 2.0, batch(2)).step_done(1, 1.0).step_done(2, 2.0).ends(3.0)
    assert exactly_once(story.events, 2, 2) == (0, 0)


def test_a_batch_given_again_after_a_failure_counts_once() -> None:
    story = Story().batch(1, 1.0, ("0/0", "0/1", "1/0", "1/0"), committed=False).batch(1, 2.0, batch(1)).ends(3.0)
    assert exactly_once(story.events, 2, 2) == (0, 0)


def test_a_missing_and_a_repeated_id_are_counted() -> None:
    story = Story().batch(1, 1.0, batch(1)).batch(2, 2.0, ("2/0", "2/1", "3/0", "0/0")).ends(3.0)
    assert exactly_once(story.events, 2, 2) == (1, 1)


def test_a_step_that_a_finished_job_never_committed_is_lost() -> None:
    story = Story().batch(1, 1.0, batch(1)).batch(2, 2.0, batch(2), committed=False).step_done(2, 2.0)
    assert exactly_once(story.events, 2, 2) == (0, 0)
    assert exactly_once(story.ends(3.0).events, 2, 2) == (4, 0)


def test_a_commit_that_was_never_said_is_shown_by_the_next_one() -> None:
    story = Story().batch(1, 1.0, batch(1), committed=False).batch(2, 2.0, batch(2)).ends(3.0)
    assert exactly_once(story.events, 2, 2) == (0, 0)


def test_rewards_are_means_over_the_ends_of_the_run_and_what_was_redone_counts_once() -> None:
    story = Story()
    for step, reward in enumerate((0.0, 0.1, 0.2, 0.5, 0.8, 0.9), start=1):
        story.step_done(step, float(step), 1, reward, f"digest {step}")
    story.step_done(6, 7.0, 2, 1.0, "digest after all")
    found = summary_of(story.ends(8.0))
    assert (found.reward_first, found.reward_last) == (pytest.approx(0.1), pytest.approx(2.3 / 3))
    assert (found.steps, found.final_digest, found.wall_s) == (6, "digest after all", 8.0)


def test_the_file_has_every_key_and_reads_back(tmp_path: Path) -> None:
    leftovers = {"processes": ["12 sleep"], "ports": [], "shared_memory": []}
    found = summarize(realistic_run(), prompts_per_step=2, samples_per_prompt=2, leftovers=leftovers)
    write_summary(found, tmp_path / "report" / "summary.json")
    tree = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert tree.keys() >= KEYS
    assert all(row.keys() >= PARTS for row in tree["recoveries"])
    assert len(tree["faults"]) == len(tree["recoveries"]) == 5
    assert tree["leftovers"] == leftovers
    assert read_summary(tmp_path / "report" / "summary.json") == found
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["summary.json"]


def test_a_summary_is_clean_only_when_every_promise_was_kept() -> None:
    story = Story(steps=1).everyone_serves(0.0).batch(1, 1.0, batch(1)).step_done(1, 1.0).ends(2.0)
    assert summary_of(story).clean
    assert not summarize(story.events, prompts_per_step=2, samples_per_prompt=2, leftovers={"ports": ["4000"]}).clean
    assert not summary_of(story.starts("rollout/0#2", 1.5, 1.5, 1.5)).clean


def test_two_runs_side_by_side_have_ratios() -> None:
    fast = summary_of(Story("role").everyone_serves(0.0).ends(10.0))
    slow = summary_of(Story("whole-job").everyone_serves(0.0).ends(20.0))
    rows = {row.name: row for row in compare(fast, slow)}
    assert (rows["policy"].a, rows["policy"].b, rows["policy"].ratio) == ("role", "whole-job", None)
    assert rows["wall_s"].ratio == 0.5
    assert rows["mttr_mean_s"].ratio is None


def test_an_empty_log_has_a_summary() -> None:
    found = summarize([], prompts_per_step=2, samples_per_prompt=2)
    assert (found.outcome, found.steps, found.ettr_strict) == ("unknown", 0, 0.0)


def test_the_tables_say_what_happened() -> None:
    found = summarize(realistic_run(), prompts_per_step=2, samples_per_prompt=2)
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(summary_tables(found))
    console.print(compare_table(compare(found, found)))
    text = console.export_text()
    assert "kill trainer/0" in text
    assert "14 in" in text
    assert "1.00" in text
