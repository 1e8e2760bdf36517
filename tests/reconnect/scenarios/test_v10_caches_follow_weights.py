"""V10: what an engine keeps of other weights (KV and prefix caches) follows the weights.

The library gives `applied` (its digest is the key under which such results may be kept) and `on_apply` (the place to
clear them, before the new weights count as applied). Either is enough; a worker whose `on_apply` raises does not serve.
"""

from __future__ import annotations

import pytest
from weights_fleet import SYSTEM_PROMPT, Fleet, KeyedWorker, NaiveWorker, Token, Worker
from weights_rig import MemberProcess, RemoteFailure, Rig, wait_until

REQUESTS = 10
"""Between two versions."""


def stale(answers: list[list[Token]]) -> int:
    """Tokens whose prefix other weights computed."""
    return sum(each.prefix != each.digest for answer in answers for each in answer)


def requests(workers: list[MemberProcess]) -> list[list[Token]]:
    """Ten new requests, spread over the workers that serve."""
    serving = [worker for worker in workers if worker.ask("health")["serving"]]
    asked = []
    for number in range(REQUESTS):
        worker = serving[number % len(serving)]
        asked.append((worker, worker.begin("generate", prompt=SYSTEM_PROMPT, tokens=4, token_s=0.002)))
    return [worker.end(number) for worker, number in asked]


def wait_for(workers: list[MemberProcess], version: str) -> None:
    for worker in workers:
        wait_until(lambda worker=worker: worker.ask("health")["version"] == version)  # type: ignore[misc]


@pytest.mark.parametrize("kind", [Worker, KeyedWorker], ids=["cleared", "keyed"])
def test_no_new_request_uses_a_prefix_of_other_weights(rig: Rig, kind: type[Worker]) -> None:
    fleet = Fleet(rig, kind)
    for worker in fleet.workers:
        worker.ask("follow")
    for step in range(2, 6):
        answers = requests(fleet.workers)
        assert {each.version for answer in answers for each in answer} == {f"1.{step - 1}"}
        assert stale(answers) == 0
        request = {"prompt": SYSTEM_PROMPT, "tokens": 20, "into": f"1.{step}"}
        running = [(worker, worker.begin("generate", **request)) for worker in fleet.workers]
        wait_until(lambda: all(worker.ask("health")["running"] for worker in fleet.workers))
        fleet.publish(f"1.{step}", step)
        wait_for(fleet.workers, f"1.{step}")
        after = requests(fleet.workers)  # while older requests still run
        assert stale(after) == 0
        for worker, number in running:
            versions = [each.version for each in worker.end(number)]
            # The rule here is "go on": tagged token by token, in the order of the versions.
            assert versions == sorted(versions)
            assert set(versions) == {f"1.{step - 1}", f"1.{step}"}


def test_the_same_traffic_shows_stale_prefixes_where_nothing_is_done(rig: Rig) -> None:
    fleet = Fleet(rig, NaiveWorker)
    requests(fleet.workers)
    digest = fleet.publish("1.2", 2)
    for worker in fleet.workers:
        assert worker.ask("sync", newer_than="1.1") == ("1.2", digest)
    assert stale(requests(fleet.workers)) > 0


def test_a_worker_that_refuses_to_clear_its_cache_is_not_served(rig: Rig) -> None:
    fleet = Fleet(rig)
    bad = fleet.workers[1]
    others = [fleet.workers[0], fleet.workers[2]]
    for worker in fleet.workers:
        worker.ask("follow")
    assert stale(requests(fleet.workers)) == 0
    bad.ask("refuse", refuses=True)
    fleet.publish("1.2", 2)
    wait_for(others, "1.2")
    wait_until(lambda: bad.ask("health")["failures"])
    health = bad.ask("health")
    assert (health["serving"], health["digest"]) == (False, None)
    with pytest.raises(RemoteFailure, match="does not serve"):
        bad.ask("generate", prompt=SYSTEM_PROMPT, tokens=1)
    before = bad.ask("health")["tokens"]
    answers = requests(fleet.workers)
    assert stale(answers) == 0
    assert {each.version for answer in answers for each in answer} == {"1.2"}
    assert bad.ask("health")["tokens"] == before
    bad.ask("refuse", refuses=False)
    bad.ask("again")
    assert bad.ask("health")["version"] == "1.2"
    assert stale(requests(fleet.workers)) == 0
    assert bad.ask("health")["tokens"] > before
