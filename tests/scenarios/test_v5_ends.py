"""V5: end of data, empty queue, dead producer and dead queue are four different things."""

from __future__ import annotations

import time

from rig.job import Job, StartJob
from rig.script import Script, answer, ledger_rows, saved_tokens

from robustrl import events

EMPTY_S = 8.0
"""The scenario says 20 s. A question for a batch waits 2 s at the ledger, so this is several empty answers as well."""


def assert_every_answer_came_once(job: Job) -> None:
    """Each batch is whole and in order, and each answer is the one that a run without faults gives."""
    script = job.script
    steps = range(1, (script.trainer_stops_after or script.steps) + 1)
    assert [row["step"] for row in job.batches()] == list(steps)
    for row in job.batches():
        first = (row["step"] - 1) * script.groups
        wanted = {
            f"{group}/{sample}": answer(group, sample, script.length(group))
            for group in range(first, first + script.groups)
            for sample in range(script.samples)
        }
        assert row["answers"] == wanted


def assert_nothing_was_generated_twice(job: Job) -> None:
    """The tokens that living engines made are exactly those that the ledger has of them."""
    kept = dict(ledger_rows(job.run_dir, "SELECT owner, tokens FROM owners"))
    for row in job.told("rollout/", "left"):
        assert row["generated"] == kept.get(row["who"], 0), row["who"]


def test_a_producer_that_exits_with_0_in_the_middle_of_its_lease_has_failed_and_is_replaced(
    start_job: StartJob,
) -> None:
    job = start_job(Script(tokens=30, exits_with_0="rollout/1"))

    assert job.end().outcome == "finished"

    [verdict] = job.verdicts()
    assert (verdict.member, verdict.incarnation, verdict.verdict, verdict.signal) == ("rollout/1", 1, "dead", "exit")
    assert verdict.evidence == "its process exited with code 0 without having finished"
    [planned] = job.logged(events.PlanMade)
    assert planned.actions == ("spawn rollout/1",)
    assert job.lives()["rollout/1"] == [1, 2]
    assert_every_answer_came_once(job)
    # What the dead one had saved was continued by another.
    [(group, kept)] = ledger_rows(
        job.run_dir, "SELECT grp, saved_tokens FROM attempts WHERE owner = 'rollout/1#1' AND outcome = 'released'"
    )
    assert kept > 0
    taken_on = [one for one in job.logged(events.Leased) if one.group == group and one.saved_tokens]
    assert [one.saved_tokens for one in taken_on] == [kept]
    assert_nothing_was_generated_twice(job)
    job.assert_only_touched("rollout/1")


def test_the_end_of_one_producer_is_not_the_end_while_two_still_work(start_job: StartJob) -> None:
    job = start_job(Script(tokens=20, leaves_early=("rollout/0",)))
    job.until(lambda: job.told("rollout/0", "left"))
    assert not job.told("trainer/", "left")
    assert not job.batches()

    assert job.end().outcome == "finished"

    assert_every_answer_came_once(job)
    assert job.lives()["rollout/0"] == [1], "who has finished is not replaced"
    assert not job.verdicts()
    assert_nothing_was_generated_twice(job)
    job.assert_only_touched()


def test_a_wait_that_no_producer_is_left_to_end_is_a_failure_and_not_the_end_of_data(start_job: StartJob) -> None:
    script = Script(tokens=20, leaves_early=("rollout/0", "rollout/1", "rollout/2"))
    job = start_job(script)

    state = job.end()

    assert state.outcome == "failed"
    assert "every rollout has finished, and answers of the batch are missing" in state.cause
    [error] = job.told("trainer/", "error")
    assert error["kind"] == "JobFailedError"
    last = max(row["t"] for row in job.told("rollout/", "left"))
    assert error["t"] - last < 5.0
    assert not job.batches()


def test_a_queue_that_is_empty_for_long_is_neither_an_end_nor_an_empty_batch(start_job: StartJob) -> None:
    job = start_job(Script(hold_from=0))
    waits_since = job.until(lambda: job.serving("trainer/0"))

    while time.time() - waits_since < EMPTY_S:
        job.until(lambda: True)
        assert [row["saw"] for row in job.told("trainer/")] == ["start"]
        assert not job.told("rollout/", "left")
    job.open("go")

    assert job.end().outcome == "finished"
    assert_every_answer_came_once(job)
    assert not job.verdicts()
    job.assert_only_touched()


def test_a_killed_queue_comes_back_with_the_same_40_and_those_in_flight_go_on(start_job: StartJob) -> None:
    finished, in_flight = range(8), (8, 9)
    script = Script(groups=10, samples=5, steps=1, tokens=3, long_from=8, long_tokens=60)
    job = start_job(script)

    def store() -> list[tuple[object, ...]]:
        return ledger_rows(
            job.run_dir,
            "SELECT grp, sample, state, attempt, owner, reward FROM samples WHERE state = 'finished' ORDER BY 1, 2",
        )

    def saved() -> int:
        return min(saved_tokens(job.run_dir, group) for group in in_flight)

    job.until(lambda: len(store()) == 40 and saved() >= 2 * script.samples and job.serving("trainer/0"))
    before, leases = store(), len(job.logged(events.Leased))
    attached = [one for one in job.logged(events.MemberReady) if one.member == "manager/0"]
    assert {one.milestone for one in attached} == {"attached", "reloaded", "serving"}

    at = job.kill("manager/0")
    seen = job.until(lambda: job.serving("manager/0", 2))
    kept = saved()
    job.until(lambda: saved() > kept)  # words arrive again
    assert seen - at < 5.0
    assert time.time() - at < 5.0

    assert [row for row in store() if row[0] in finished] == before
    [verdict] = job.verdicts()
    assert (verdict.member, verdict.verdict, verdict.signal, verdict.phase) == ("manager/0", "dead", "exit", "idle")
    assert "killed by SIGKILL" in verdict.evidence
    # The consumer was told that a role is down; it saw no end, and no batch that is not one.
    down = [one for one in job.logged(events.Alarm) if "role manager is down" in one.text]
    assert "trainer/0" in {one.member for one in down}
    assert [row["saw"] for row in job.told("trainer/")] == ["start"]

    assert job.end().outcome == "finished"
    assert_every_answer_came_once(job)
    assert len(job.logged(events.Leased)) == leases, "the leases held over the manager's death"
    assert_nothing_was_generated_twice(job)
    assert job.lives()["manager/0"] == [1, 2]
    job.assert_only_touched("manager/0")


def test_everything_ends_when_the_trainer_finishes_while_dispatch_is_paused(start_job: StartJob) -> None:
    # The last prompt of step 2 is held, so the other two rollouts wait for a lease that does not come.
    job = start_job(Script(groups=4, tokens=3, hold_from=7, trainer_stops_after=1))
    phases = ["tool", "wait", "wait"]
    job.until(lambda: job.batches() and sorted(job.phases().get(f"rollout/{n}", "") for n in range(3)) == phases)
    job.until(lambda: len(ledger_rows(job.run_dir, "SELECT 1 FROM samples WHERE state = 'finished' AND grp > 3")) == 6)

    at = job.open("stop")
    state = job.end(10.0)

    assert time.time() - at < 10.0
    assert job.launcher.supervisor is None
    assert state.outcome == "finished"
    assert_every_answer_came_once(job)
    assert {row["who"] for row in job.told(saw="left")} == {
        "manager/0#1", "trainer/0#1", "rollout/0#1", "rollout/1#1", "rollout/2#1"
    }  # fmt: skip
    assert not job.verdicts()
    [ended] = job.logged(events.JobEnded)
    assert (ended.outcome, ended.cause) == ("finished", "")
    job.assert_only_touched()
