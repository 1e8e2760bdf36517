"""V4: all producers die, or their error is swallowed. The trainer's wait must not go on for ever."""

from __future__ import annotations

from msgspec.structs import replace
from rig.job import DETECT, Job, StartJob
from rig.script import Script, answer, ledger_rows, recorded_failures

from robustrl import events
from robustrl.config import PersistConfig, RestartConfig

ROLLOUTS = ("rollout/0", "rollout/1", "rollout/2")
NO_REPLACEMENT = RestartConfig(budget=0)
LIMIT_S = 5.0
STREAK = 15


def generating(job: Job) -> bool:
    """Whether each rollout has saved a second's worth of tokens: the supervisor knows its phase by then."""
    rows = ledger_rows(job.run_dir, "SELECT count(*) FROM owners WHERE tokens >= 40")
    return bool(rows and rows[0][0] == len(ROLLOUTS))


def error_of_the_wait(job: Job, since: float) -> str:
    """What the trainer's wait raised, no later than the limit after `since`."""
    [error] = job.until(lambda: job.told("trainer/", "error"))
    assert error["kind"] == "JobFailedError"
    assert error["t"] - since < LIMIT_S
    assert error["pid"] == job.told("trainer/", "start")[0]["pid"]
    return str(error["text"])


def cause_of(verdict: events.VerdictReached) -> str:
    return f"{verdict.member}#{verdict.incarnation} ({verdict.verdict}, {verdict.signal}): {verdict.evidence}"


def test_the_trainers_wait_raises_the_first_cause_when_all_rollouts_are_killed(start_job: StartJob) -> None:
    job = start_job(Script(tokens=1000), restart=NO_REPLACEMENT)
    job.until(lambda: generating(job) and job.serving("trainer/0"))

    text = error_of_the_wait(job, job.kill(*ROLLOUTS))

    state = job.end(LIMIT_S)
    first, *others = job.verdicts()
    assert {one.member for one in (first, *others)} == set(ROLLOUTS)
    for verdict in (first, *others):
        assert (verdict.verdict, verdict.signal, verdict.phase) == ("dead", "exit", "generate")
        assert "killed by SIGKILL" in verdict.evidence
    assert state.outcome == "failed"
    assert state.cause == cause_of(first)
    assert state.cause in text
    job.assert_only_touched()


def test_an_exception_in_a_background_task_reaches_the_trainers_wait_with_its_traceback(start_job: StartJob) -> None:
    job = start_job(Script(tokens=1000, background_fails=True), restart=NO_REPLACEMENT)
    job.until(lambda: generating(job) and job.serving("trainer/0"))

    text = error_of_the_wait(job, job.open("fault"))

    state = job.end(LIMIT_S)
    first, *others = job.verdicts()
    assert {one.member for one in (first, *others)} == set(ROLLOUTS)
    for verdict in (first, *others):
        assert (verdict.verdict, verdict.signal, verdict.phase) == ("dead", "report", "generate")
        assert f"ValueError: the decode task of {verdict.member}#1 broke" in verdict.evidence
    assert state.outcome == "failed"
    assert state.cause == cause_of(first)
    assert state.cause in text
    assert "Traceback (most recent call last)" in text
    assert "in decode" in text
    job.assert_only_touched()


def test_failures_up_to_the_limit_and_a_success_abort_nothing_and_start_the_count_anew(start_job: StartJob) -> None:
    script = Script(failures=STREAK // len(ROLLOUTS), rounds=2)
    job = start_job(script, persist=PersistConfig(max_failure_streak=STREAK))

    assert job.end().outcome == "finished"

    assert recorded_failures(job.run_dir) == 2 * STREAK
    assert [row["step"] for row in job.batches()] == [1, 2]
    for row in job.batches():
        assert len(row["answers"]) == script.groups * script.samples
        for name, ids in row["answers"].items():
            group, sample = map(int, name.split("/"))
            assert ids == answer(group, sample, script.tokens)
    assert not job.verdicts()
    job.assert_only_touched()


def test_one_failure_above_the_limit_gives_the_job_up_with_the_first_cause(start_job: StartJob) -> None:
    script = Script(hold_from=0, failures=STREAK + 1, rollouts=3)
    job = start_job(script, persist=PersistConfig(max_failure_streak=STREAK))
    job.until(lambda: job.serving("trainer/0"))

    text = error_of_the_wait(job, job.open("go"))

    state = job.end(LIMIT_S)
    group, owner, detail = ledger_rows(
        job.run_dir, "SELECT grp, owner, detail FROM attempts WHERE outcome = 'failed: sandbox' ORDER BY leased_at"
    )[0]
    assert f"sandbox of group {group} at {owner}: {detail}" in state.cause
    assert state.cause == text
    assert state.outcome == "failed"
    assert not job.verdicts(), "nobody was replaced for what no replacement mends"
    job.assert_only_touched()


def test_a_wait_without_progress_says_which_role_and_phase_is_awaited(start_job: StartJob) -> None:
    job = start_job(Script(hold_from=0), detect=replace(DETECT, notice_s=0.7))

    def notices() -> list[str]:
        return [one.text for one in job.logged(events.Alarm) if one.member == "trainer/0" and "has waited" in one.text]

    held = [f"{member}#1 serving in phase tool" for member in ROLLOUTS]
    text = job.until(lambda: next((text for text in notices() if all(one in text for one in held)), ""))
    assert "step 1 has waited" in text
    assert "awaited role rollout" in text

    job.open("go")
    assert job.end().outcome == "finished"
    assert not job.verdicts()
    job.assert_only_touched()
