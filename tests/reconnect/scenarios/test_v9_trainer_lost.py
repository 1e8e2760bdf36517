"""V9: the trainer dies in mid-sync and the rollout fleet lives on."""

from __future__ import annotations

import time
from itertools import pairwise

from weights_fleet import Fleet, Trainer, expected, token
from weights_rig import Rig, wait_until

from robustrl.roles import Version

ROLLOUTS = 8
TOKENS = 100


def test_a_trainer_killed_at_bucket_5_of_10_costs_no_worker_and_no_rollout(rig: Rig) -> None:
    fleet = Fleet(rig)
    pids = fleet.pids()
    for worker in fleet.workers:
        worker.ask("start_rollouts", count=ROLLOUTS, tokens=TOKENS)
        worker.ask("slow", pause_s=0.1)
    fleet.trainer.ask("serve_slowly", pause_s=0.1)
    half = fleet.publish("1.2", 2)
    pulling = [worker.begin("sync", newer_than="1.1", timeout=2.5) for worker in fleet.workers]
    wait_until(lambda: max(worker.landed.value for worker in fleet.workers) >= 5)
    fleet.trainer.kill()
    killed = time.monotonic()
    fleet.fence("trainer/0#2")
    made = [worker.ask("health")["tokens"] for worker in fleet.workers]
    for worker, number in zip(fleet.workers, pulling, strict=True):
        got = worker.end(number)
        live = worker.ask("live_weights")
        if rig.config.transport == "shm" and got is not None:
            # The kernel keeps a dead trainer's memory for who has its descriptor: the version arrived whole.
            assert (got, live) == (("1.2", half), expected(2))
        else:
            assert got is None
            assert worker.ask("stats")["held"] == ["1.1"]
            assert worker.ask("health")["version"] == "1.1"
            assert live == expected(1)
    # Generation went on all the time.
    for worker, before in zip(fleet.workers, made, strict=True):
        assert worker.ask("health")["tokens"] > before + 10

    again = rig.member("trainer/0#2", kind=Trainer)
    digest = again.ask("publish_weights", version="2.2", seed=22)
    for worker in fleet.workers:
        assert worker.ask("sync", newer_than="1.2") == ("2.2", digest)
        assert worker.ask("live_weights") == expected(22)
    assert time.monotonic() - killed < 15
    assert fleet.pids() == pids
    assert all(worker.process.is_alive() for worker in fleet.workers)

    for worker in fleet.workers:
        wait_until(lambda worker=worker: len(worker.ask("rollouts")) == ROLLOUTS)  # type: ignore[misc]
        answers = worker.ask("rollouts")
        assert [len(answer) for answer in answers] == [TOKENS] * ROLLOUTS
        for answer in answers:
            versions = [Version.parse(each.version) for each in answer]
            assert all(one <= other for one, other in pairwise(versions))
    for index in range(ROLLOUTS):
        made_by_first = {answer[0].value for answer in fleet.workers[0].ask("rollouts")}
        assert token(f"rollout/0#1/{index}", fleet.digests["1.1"], 0) in made_by_first
