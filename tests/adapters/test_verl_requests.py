"""Requests and samples that were met by a loss: continued or made again, within bounds, and never an end marker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from robustrl.errors import RoleDownError
from robustrl_verl import requests, samples

exceptions = pytest.importorskip("ray.exceptions")


class Remote:
    """A method of an actor that notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def remote(self, *args: Any) -> None:
        self.calls.append(args)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = SimpleNamespace(lost=Remote())
    monkeypatch.setattr(requests, "find_hub", lambda: found)
    for module in (requests, samples):
        monkeypatch.setattr(module, "PAUSE_S", 0.001)
    return found


class Client:
    """verl's client: each call of `leg` goes to the next server of the list, or fails as it says."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.asked: list[dict[str, Any]] = []
        self._load_balancer = SimpleNamespace(remove_servers=Remote())

    async def acquire(self, request_id: str) -> tuple[str, None]:
        return f"server-{len(self.asked)}", None

    async def leg(self, request_id: str, **kwargs: Any) -> str:
        server, _ = await requests.acquire_server(Client.acquire, self, request_id)
        self.asked.append(kwargs)
        kwargs.pop("priority", None)  # verl takes arguments out of what it is given
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return f"{outcome} by {server}"

    async def generate(self) -> str:
        return str(await requests.generate(Client.leg, self, "r1", prompt_ids=[1, 2, 3], priority=7))


def test_a_request_goes_on_elsewhere_with_all_that_it_had(hub: Any) -> None:
    client = Client(exceptions.ActorDiedError(), exceptions.ActorUnavailableError("busy", None), "done")
    assert asyncio.run(client.generate()) == "done by server-2"
    assert all(asked == {"prompt_ids": [1, 2, 3]} for asked in client.asked)
    assert client._load_balancer.remove_servers.calls == [(["server-0"],), (["server-1"],)]
    assert [server for server, _ in hub.lost.calls] == ["server-0", "server-1"]


def test_an_error_of_the_request_itself_is_the_requests(hub: Any) -> None:
    client = Client(ValueError("the prompt is too long"))
    with pytest.raises(ValueError, match="too long"):
        asyncio.run(client.generate())
    assert hub.lost.calls == [] and client._load_balancer.remove_servers.calls == []


def test_tries_are_bounded_and_the_cause_is_said(hub: Any) -> None:
    client = Client(*[exceptions.ActorDiedError() for _ in range(99)])
    with pytest.raises(RoleDownError, match="request r1 was given up after 16 tries: The actor died"):
        asyncio.run(client.generate())
    assert len(client.asked) == 16


def test_a_moment_without_servers_is_waited_for(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = RuntimeError("No available servers in load balancer")
    assert asyncio.run(Client(nobody, nobody, "done").generate()) == "done by server-2"
    monkeypatch.setattr(requests, "NOBODY_S", 0.002)
    with pytest.raises(RuntimeError, match="No available servers"):
        asyncio.run(Client(*[nobody] * 9).generate())


def test_a_dead_engine_is_a_lost_server_and_other_remote_errors_are_not() -> None:
    class EngineDeadError(Exception):
        pass

    def remote(cause: Exception) -> Any:
        return exceptions.RayTaskError("generate", "", cause)

    assert requests.server_lost(remote(EngineDeadError()))
    assert requests.server_lost(remote(exceptions.ActorDiedError()))
    assert not requests.server_lost(remote(ValueError()))
    assert not requests.server_lost(ValueError())


# -- samples --------------------------------------------------------------------------------------------------------


class Queue:
    def __init__(self) -> None:
        self.put: list[Any] = []

    async def put_sample(self, sample: Any) -> bool:
        self.put.append(sample)
        return True


class Rollouter:
    """Fails each sample as often as it is told; ends as verl's does, with a word to the queue whatever happened."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.message_queue_client = Queue()

    async def process(self, sample: Any) -> None:
        assert sample.full_batch == "prompt"
        sample.full_batch = "half an answer"
        self.failures -= 1
        if self.failures >= 0:
            raise RuntimeError("an agent loop worker died")
        await samples.put_sample(Queue.put_sample, self.message_queue_client, "answer")

    async def loop(self) -> None:
        sample = SimpleNamespace(sample_id="s1", full_batch="prompt")
        await samples.process_sample(Rollouter.process, self, sample)

    async def run(self) -> None:
        try:
            await samples.noticed(Rollouter.loop, self)
        except Exception:
            pass  # as asyncio.gather(..., return_exceptions=True)
        finally:
            await samples.put_sample(Queue.put_sample, self.message_queue_client, None)


def test_a_failed_sample_is_made_again_from_its_prompt(hub: Any) -> None:
    rollouter = Rollouter(failures=3)
    asyncio.run(samples.fit(Rollouter.run, rollouter))
    assert rollouter.message_queue_client.put == ["answer", None]


def test_a_sample_that_cannot_be_made_is_a_failure_and_no_end(hub: Any) -> None:
    rollouter = Rollouter(failures=99)
    with pytest.raises(RoleDownError, match="the rollouter ended early: an agent loop worker died"):
        asyncio.run(samples.fit(Rollouter.run, rollouter))
    assert rollouter.message_queue_client.put == []
