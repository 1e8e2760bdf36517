"""The trainer's keeper with real Ray actors in the place of verl's: what is made anew, and when it is given up."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from robustrl.errors import JobFailedError
from robustrl.events import JobEnded, MemberMoved, PlanMade, Restored, of_kind, read_events

ray = pytest.importorskip("ray")

BATCHES = 8


class Queue:
    """verl's queue, with all its samples in it from the beginning."""

    def __init__(self) -> None:
        self.queue: deque[Any] = deque([*(b"%d" % number for number in range(BATCHES)), None])
        self.running = True
        self._lock = asyncio.Lock()
        self._consumer_condition = asyncio.Condition(self._lock)

    async def get_sample(self) -> Any:
        from robustrl_verl import journal

        async def plain(queue: Queue) -> Any:
            async with queue._lock:
                return queue.queue.popleft(), len(queue.queue)

        return await journal.get_sample(plain, self)


class Worker:
    async def pid(self) -> int:
        return os.getpid()


class Trainer:
    """Takes one sample a step, saves every second version, and fails in the versions that it is told to."""

    def __init__(self, queue: Any, folder: str, fails: list[int], life: int) -> None:
        self.queue, self.folder, self.fails, self.life = queue, Path(folder), fails, life
        self.version = self.global_steps = 0
        self.trigger_parameter_sync_step = 1
        self.worker = ray.remote(num_cpus=0)(Worker).remote()

    async def get_actor_wg(self) -> Any:
        return SimpleNamespace(workers=[self.worker])

    async def set_rollouter(self, rollouter: Any) -> None: ...

    async def set_total_train_steps(self, steps: int) -> None: ...

    async def set_message_queue_client(self, client: Any) -> None: ...

    async def load_checkpoint(self) -> int:
        saved = self.folder / "saved"
        self.version = int(saved.read_text()) if saved.exists() else 0
        return self.version

    async def _fit_update_weights(self) -> None: ...

    async def fit(self) -> None:
        from robustrl_verl import journal

        while True:
            await self.queue.__ray_call__.remote(journal.begin, self.version)
            sample, _ = await self.queue.get_sample.remote()
            if sample is None:
                return
            if self.version in self.fails:
                raise RuntimeError(f"life {self.life} failed in version {self.version}")
            with (self.folder / "trained").open("a") as file:
                file.write(f"{self.life} {self.version} {sample.decode()}\n")
            self.version += 1
            if self.version % 2 == 0:
                (self.folder / "saved").write_text(str(self.version))
                await self.queue.__ray_call__.remote(journal.commit, self.version)


class Rollouter:
    async def fit(self) -> None: ...

    async def get_total_train_steps(self) -> int:
        return BATCHES


class Runner:
    """verl's task runner: `lives` says of each trainer in which versions it fails."""

    def __init__(self, folder: Path, lives: list[list[int]]) -> None:
        remote: Any = ray.remote(num_cpus=0)
        self.remote, self.folder, self.lives, self.life = remote, folder, iter(lives), 0
        queue = remote(Queue).remote()
        self.components: dict[str, Any] = {
            "message_queue": queue,
            "message_queue_client": SimpleNamespace(),
            "rollouter": remote(Rollouter).remote(),
            "config": None,
        }
        self._create_trainer(None)

    def _create_trainer(self, config: Any) -> None:
        self.life += 1
        fails = next(self.lives)
        if fails == [-1]:
            raise RuntimeError("no room for a trainer")
        queue = self.components["message_queue"]
        self.components["trainer"] = self.remote(Trainer).remote(queue, str(self.folder), fails, self.life)


class Ran:
    def __init__(self, run: Path, folder: Path, lives: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
        from robustrl_verl import hub as hubs
        from robustrl_verl import trainer

        monkeypatch.setattr(hubs, "NAME", f"hub of {folder.name}")
        monkeypatch.setattr(trainer, "_resuming", lambda config, saved: contextlib.nullcontext())
        folder.mkdir()
        log = run / "events.jsonl"
        log.unlink(missing_ok=True)
        hub = hubs.start_hub()
        self.error: JobFailedError | None = None
        keeper = trainer.Keeper(Runner(folder, lives), hub)
        keeper.serving()
        try:
            keeper.run()
        except JobFailedError as error:
            self.error = error
        ray.get(hub.contact.remote(), timeout=60)  # what was said before this call has been written
        ray.kill(hub)
        self.said = read_events(log)
        self.trained = [tuple(line.split()) for line in (folder / "trained").read_text().splitlines()]


def test_a_lost_trainer_goes_on_from_its_checkpoint_with_the_samples_after_it(
    attached_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One Ray for all: starting it takes longer than what is tested."""
    scenarios: list[tuple[list[list[int]], list[int]]] = [
        ([[]], []),
        ([[5], []], [4]),
        ([[3], [5], []], [2, 4]),
        ([[1], [-1], [3], []], [0, 2]),
    ]
    for number, (lives, restored) in enumerate(scenarios):
        ran = Ran(attached_ray, attached_ray.parent / f"s{number}", lives, monkeypatch)
        assert ran.error is None, str(ran.error)
        assert {(version, sample) for _, version, sample in ran.trained} == {(str(n), str(n)) for n in range(BATCHES)}
        assert [event.step for event in of_kind(ran.said, Restored)] == restored
        assert [event.outcome for event in of_kind(ran.said, JobEnded)] == ["finished"]
        starts = [event.incarnation for event in of_kind(ran.said, MemberMoved) if event.after == "starting"]
        assert starts == list(range(1, len(lives) + 1))


def test_what_fails_twice_ends_the_job_with_the_first_cause(
    attached_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenarios = [
        ([[5], [5], []], "life 1 failed in version 5", "failed twice in step 6"),
        ([[3], [-1], [-1], []], "life 1 failed in version 3", "restart of trainer/0 failed twice"),
    ]
    for number, (lives, cause, why) in enumerate(scenarios):
        ran = Ran(attached_ray, attached_ray.parent / f"f{number}", lives, monkeypatch)
        assert ran.error is not None
        assert ran.error.why is not None and cause in ran.error.why and why in ran.error.why
        (ended,) = of_kind(ran.said, JobEnded)
        assert ended.outcome == "failed" and cause in ended.cause
        assert [event.actions for event in of_kind(ran.said, PlanMade)][-1] == ("restart the whole job",)
