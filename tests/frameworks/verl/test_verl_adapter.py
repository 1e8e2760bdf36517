"""robustrl attached to verl's fully asynchronous trainer: real processes, killed on purpose."""

from __future__ import annotations

import os
import signal

import pytest
from census import Proc
from installed import ROOT
from verl_job import VerlJob

from robustrl.events import JobEnded, MemberMoved, Restored, VerdictReached, VersionCommitted, of_kind, read_events
from robustrl_verl.plugin import OURS

STEPS = 14
RECOVERY_S = 150.0
LIVE_ON = ("FullyAsyncTaskRunner", "FullyAsyncRollouter", "MessageQueue", "AgentLoopWorker")

pytestmark = pytest.mark.timeout(420)


def others(job: VerlJob) -> dict[str, Proc]:
    """The roles that a trainer's or a replica's death must not touch."""
    return {title: job.role(title) for title in LIVE_ON}


def moves(job: VerlJob, member: str) -> list[tuple[int, str]]:
    return [
        (event.incarnation, event.after)
        for event in of_kind(read_events(job.run / "events.jsonl"), MemberMoved)
        if event.member == member
    ]


def check_weights(job: VerlJob) -> int:
    """Each set of weights that a replica held was, bit by bit, the last that a trainer had sent. Returns how many."""
    sent = ""
    loaded = 0
    for fact in sorted([*job.told("sent"), *job.told("loaded")], key=lambda fact: fact["time"]):
        if fact["what"] == "sent":
            sent = fact["digest"]
        else:
            assert fact["digest"] == sent, f"replica {fact['rank']} holds other weights at version {fact['version']}"
            loaded += 1
    return loaded


def test_hub_replica_and_trainer_are_killed_in_turn_and_training_goes_on() -> None:
    flags = ["trainer.save_freq=2"]
    with VerlJob(steps=STEPS, replicas=2, adapter=True, token_s=0.01, flags=flags) as job:
        job.until_step(2)
        before = others(job)
        replica, survivor = job.replica(0), job.replica(1)
        (worker,) = job.trainer_workers()
        (hub,) = job.processes(r"^ray::Hub")
        hub.kill()
        job.until_step(job.step() + 2)
        replica.kill()
        job.until(lambda: (1, "dead") in moves(job, "rollout/0"), 60, "the replica's death is noticed")
        seen = job.step()
        job.until_step(seen + 2)
        assert job.trainer_workers() == [worker], "the trainer is as it was"

        worker.kill()
        job.until(lambda: (2, "serving") in moves(job, "trainer/0"), RECOVERY_S, "the trainer is back")
        assert others(job) == before
        assert job.replica(1) == survivor and survivor.alive()
        assert job.trainer_workers() != [worker]

        assert job.wait(RECOVERY_S) == 0
        assert job.step() == STEPS and sorted(set(job.steps())) == list(range(1, STEPS + 1))
        said = read_events(job.run / "events.jsonl")
        verdicts = list(of_kind(said, VerdictReached))
        assert [(event.member, event.verdict) for event in verdicts] == [("rollout/0", "dead"), ("trainer/0", "dead")]
        assert {event.signal for event in verdicts} <= {"exit", "report"}
        (restored,) = of_kind(said, Restored)
        assert restored.step >= 2 and restored.step % 2 == 0
        assert [event.outcome for event in of_kind(said, JobEnded)] == ["finished"]
        versions = [event.version for event in of_kind(said, VersionCommitted) if event.member == "rollout/1"]
        assert versions[-1] == f"2.{STEPS}"
        assert f"2.{restored.step}" in versions, "the new trainer's first weights are those of its checkpoint"
        assert check_weights(job) >= STEPS
        assert job.leftovers() == []


def test_without_a_replica_left_the_job_fails_with_the_first_cause() -> None:
    """The one is killed, the other frozen."""
    flags = ['robustrl.detect.limits={"rollout.ping": 8}']
    with VerlJob(steps=500, replicas=2, adapter=True, token_s=0.01, flags=flags) as job:
        job.until_step(1)
        job.replica(1).kill()
        job.until(lambda: (1, "dead") in moves(job, "rollout/1"), 60, "the first death is noticed")
        job.replica(0).kill(signal.SIGSTOP)
        assert job.wait(90) != 0
        cause = "no rollout replica is left; the first loss: rollout/1#1 was lost"
        assert f"robustrl: the job was given up: {cause}" in job.text()
        (ended,) = of_kind(read_events(job.run / "events.jsonl"), JobEnded)
        assert ended.outcome == "failed" and ended.cause.startswith(cause)
        assert job.leftovers() == []


def test_the_checkpoint_engine_works_alone_by_verls_own_setting() -> None:
    """No `robustrl run`, no patch: verl as it is, with two settings."""
    flags = [f"{name}={value}" for name, value in OURS.items()]
    flags += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"]
    job = VerlJob(steps=3, replicas=2, trainers=2, flags=flags)
    job.env["PYTHONPATH"] += os.pathsep + os.pathsep.join([str(ROOT / "src"), str(ROOT / "adapters")])
    with job:
        assert job.wait(240) == 0
        assert job.step() == 3
        assert {fact["version"] for fact in job.told("loaded")} >= {0, 1, 2, 3}
        assert check_weights(job) >= 2 * 4
        assert job.leftovers() == []
