"""What stock verl does when a role dies, so that what robustrl changes is known to be a change."""

from __future__ import annotations

import pytest
from verl_job import VerlJob

pytestmark = pytest.mark.timeout(300)

LONG = 400
"""Steps that none of these jobs gets to."""


def test_a_lost_replica_of_stock_verl_ends_the_job_early_as_if_all_were_well() -> None:
    # No synchronisation comes near, and answers take a while: some are on their way when the replica dies.
    with VerlJob(steps=LONG, sync_every=LONG // 2, replicas=2, token_s=0.1) as job:
        job.until_step(2)
        job.replica(1).kill()
        assert job.wait(90) == 0
        assert job.step() < LONG // 4
        assert job.leftovers() == []


def test_a_lost_trainer_worker_ends_stock_verl() -> None:
    with VerlJob(steps=LONG, replicas=1, token_s=0.1) as job:
        job.until_step(3)
        (worker,) = job.trainer_workers()
        worker.kill()
        assert job.wait(90) == 1
        assert job.step() < LONG // 4
        assert job.leftovers() == []
        # What comes before the fault is as it should be: each version that the replica holds is the trainer's own.
        sent = {line["version"]: line["digest"] for line in job.told("sent")}
        loaded = job.told("loaded")
        assert {0, 1, 2} <= sent.keys()
        assert len(set(sent.values())) == len(sent)
        assert {line["rank"] for line in loaded} == {0}
        assert all(sent.get(line["version"]) == line["digest"] for line in loaded)
