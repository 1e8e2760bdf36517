"""The task runner: when the trainer role is lost, it alone is made anew, and everybody else goes on.

verl's task runner waits for trainer and rollouter and cancels the one when the other fails. Here it waits for more (its
trainer's workers, and the hub's word that the job is given up), and a lost trainer is a plan, a new trainer actor with
new workers, verl's newest checkpoint, the samples after it, and a version that is above all before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from robustrl import events
from robustrl.attach import assert_applied
from robustrl.attach.patches import MARK
from robustrl.config import RobustConfig
from robustrl.errors import DeadlineError, JobFailedError
from robustrl.restart import Loss, MemberState, Roster, Spawn
from robustrl.roles import TRAINER, Member
from robustrl_verl import journal
from robustrl_verl.fleet import decide, end_actors, first_line
from robustrl_verl.hub import ask_now, call_hub_now, session_config, start_hub
from robustrl_verl.plugin import SEAMS, targets

log = logging.getLogger("robustrl.verl")

START_S: Final = 1800.0
"""Seconds for each part of a start: workers, checkpoint, weights (``detect.limits['trainer.init']``)."""
POLL_S: Final = 1.0
POOL: Final = "trainer_pool"
"""How verl names the placement groups of the trainer role."""
ME: Final = Member(TRAINER)

T = TypeVar("T")


def attach(wrapped: Callable[..., Any], runner: Any, config: Any) -> None:
    """Wraps FullyAsyncTaskRunner._initialize_components: the hub is there before, the patches are checked after."""
    hub = start_hub()
    ask_now(hub.contact.remote(), START_S)
    runner._robustrl = Keeper(runner, hub)
    wrapped(runner, config)
    check_patches(runner)
    runner._robustrl.serving()


def run(wrapped: Callable[..., Any], runner: Any) -> None:
    """Takes the place of FullyAsyncTaskRunner._run_training_loop."""
    runner.running = True
    try:
        runner._robustrl.run()
    finally:
        with contextlib.suppress(Exception):
            asyncio.run(runner.components["message_queue_client"].clear_queue())


class Keeper:
    """Keeps the trainer role going, from inside verl's task runner.

    Args:
        runner: verl's task runner; its `components` follow.
        hub: the job's hub.
    """

    def __init__(self, runner: Any, hub: Any) -> None:
        self._runner = runner
        self._hub = hub
        self._config: RobustConfig = session_config()
        self._limit = self._config.detect.limits.get("trainer.init", START_S)
        self._roster = Roster([], self.emit)
        self._history: list[Loss] = []
        self._watched: dict[Any, Any] = {}
        """Outstanding questions to the trainer's workers, and to whom."""
        self._roster.move(ME, MemberState.STARTING)

    def emit(self, event: Any) -> None:
        with contextlib.suppress(Exception):
            self._hub.say.remote(event)

    @property
    def _components(self) -> dict[str, Any]:
        components: dict[str, Any] = self._runner.components
        return components

    def serving(self) -> None:
        """The trainer has what it needs, and begins."""
        self._roster.move(ME, MemberState.PENDING_WEIGHTS)
        self._roster.move(ME, MemberState.SERVING)

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Returns when trainer and rollouter have ended well. Raises JobFailedError with the first cause."""
        import ray

        rolling = self._components["rollouter"].fit.remote()
        training = self._components["trainer"].fit.remote()
        given_up = self._hub.failure.remote(self._limit)
        self._watch_workers()
        while rolling is not None or training is not None:
            refs = [ref for ref in (rolling, training, given_up, *self._watched) if ref is not None]
            if not ray.wait(refs, num_returns=1, timeout=POLL_S)[0]:
                continue
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
            if given_up in done:
                if cause := _outcome(given_up):
                    raise JobFailedError("the job was given up", why=str(cause))
                time.sleep(POLL_S / 10)  # it may be the hub that has gone, for a moment
                given_up = self._hub.failure.remote(self._limit)
            lost = self._dead_worker(done) if training is not None else None
            if lost is None and training is not None and training in done:
                lost = _error_of(training)
                training = None if lost is None else training
            if lost is not None:
                training = self._replace(lost)
            if rolling is not None and rolling in done:
                failed = _error_of(rolling)
                if failed is not None:
                    self._give_up(f"the rollouter was lost: {first_line(failed)}", failed)
                rolling = None
        self._roster.move(ME, MemberState.FINISHED)
        with contextlib.suppress(Exception):  # the hub goes with this process: it must have written before
            ask_now(self._hub.say.remote(events.JobEnded(outcome="finished")))

    def _watch_workers(self) -> None:
        """Asks each worker of the trainer something; the answer is its death, or comes when it has time."""
        self._watched = {}
        with contextlib.suppress(Exception):
            group = ask_now(self._components["trainer"].get_actor_wg.remote(), self._limit)
            self._watched = {worker.__ray_ready__.remote(): worker for worker in group.workers}

    def _dead_worker(self, done: Sequence[Any]) -> BaseException | None:
        for ref in [ref for ref in done if ref in self._watched]:
            worker = self._watched.pop(ref)
            error = _error_of(ref)
            if error is not None:
                return error
            # An idle worker answers at once: it is asked ten times a second, not as fast as it can.
            time.sleep(POLL_S / 10)
            self._watched[worker.__ray_ready__.remote()] = worker
        return None

    def _give_up(self, cause: str, error: BaseException | None = None) -> None:
        first = cause
        with contextlib.suppress(Exception):
            first = call_hub_now("give_up", cause)
        raise JobFailedError("the job was given up", why=first) from error

    # -- recovery -------------------------------------------------------------------------------------------------

    def _replace(self, error: BaseException) -> Any:
        """A new trainer, training; its fit's future. Raises JobFailedError when the plan is to give up."""
        served = True
        while True:
            # What the trainer says may be the echo of something else that was noticed in the meantime.
            if cause := call_hub_now("failure", 0.0):
                raise JobFailedError("the job was given up", why=cause) from error
            self._lose(error, served)
            try:
                return self._start()
            except Exception as failed:
                log.exception("the trainer could not be started again")
                error, served = failed, False

    def _lose(self, error: BaseException, served: bool) -> None:
        """Notes the loss and plans. Returns when the plan is a new trainer."""
        record = self._roster[ME]
        version, _ = ask_now(self._components["message_queue"].__ray_call__.remote(journal.at))
        cause = f"{record.identity} {'was lost' if served else 'could not be started'}: {first_line(error)}"
        step = version + 1 if served else -1
        # Only what is behind has been recovered from: in the step that failed before, it is the same trouble still.
        self._history = [
            msgspec.structs.replace(old, recovered=old.recovered or old.step < step) for old in self._history
        ]
        loss = Loss(record.identity, time.time(), step, cause, served=served)
        self.emit(
            events.VerdictReached(
                member=str(ME),
                incarnation=record.incarnation,
                verdict="dead",
                phase="train" if served else "init",
                signal="exit",
                evidence=cause,
            )
        )
        self._roster.move(ME, MemberState.DEAD, cause)
        decided = decide(loss, self._roster, self._history, self._config)
        self.emit(
            events.PlanMade(
                member=str(ME),
                incarnation=record.incarnation,
                actions=tuple(str(action) for action in decided.actions),
                why=decided.why,
            )
        )
        if not any(isinstance(action, Spawn) for action in decided.actions):
            # A whole job is started again by whoever started this one; verl then resumes from its checkpoint.
            first = next((old.cause for old in self._history if not old.recovered), cause)
            self._give_up(f"{first} ({decided.why})", error)

    def _start(self) -> Any:
        began = time.monotonic()
        components, queue = self._components, self._components["message_queue"]
        incarnation = self._roster.move(ME, MemberState.STARTING).incarnation
        _end_trainer(components.pop("trainer", None), self._limit)
        call_hub_now("resume", ME.role, ME.index, incarnation - 1)

        _, saved = ask_now(queue.__ray_call__.remote(journal.at))
        with _resuming(components["config"], saved is not None):
            self._runner._create_trainer(components["config"])
        trainer = components["trainer"]
        for call in (
            trainer.set_rollouter.remote(components["rollouter"]),
            trainer.set_total_train_steps.remote(ask_now(components["rollouter"].get_total_train_steps.remote())),
            trainer.set_message_queue_client.remote(components["message_queue_client"]),
        ):
            ask_now(call, self._limit)
        version = int(ask_now(trainer.load_checkpoint.remote(), self._limit) or 0)
        again, _, gone = ask_now(queue.__ray_call__.remote(journal.rewind, version))
        self.emit(events.Restored(step=version, source="disk", seconds=round(time.monotonic() - began, 3)))
        if gone:
            text = f"{gone} samples that were trained on after version {version} are not there any more"
            self.emit(events.Alarm(text=text, member=str(ME)))
        ask_now(trainer.__ray_call__.remote(count_from, version))
        self._roster.move(ME, MemberState.PENDING_WEIGHTS)
        ask_now(trainer._fit_update_weights.remote(), self._limit)
        self._roster.move(ME, MemberState.SERVING)
        log.warning(
            "the trainer is back at version %d after %.1f s, %d samples again", version, time.monotonic() - began, again
        )
        training = trainer.fit.remote()
        self._watch_workers()
        return training


def count_from(trainer: Any, version: int) -> None:
    """Runs inside the trainer: its steps are counted on as if it had never gone. A resumed verl counts one too many."""
    trainer.global_steps = version * trainer.trigger_parameter_sync_step


@contextlib.contextmanager
def _resuming(config: Any, saved: bool) -> Any:
    """Lets the trainer that is made inside find this run's own checkpoint, whatever the run itself began from."""
    if not saved:
        yield
        return
    from omegaconf import open_dict

    before = config.trainer.resume_mode
    try:
        with open_dict(config):
            config.trainer.resume_mode = "auto"
        yield
    finally:
        with open_dict(config):
            config.trainer.resume_mode = before


def _end_trainer(trainer: Any, limit: float) -> None:
    """Ends what is left of the trainer role, and waits until its placement groups' names are free again."""
    from ray.util import get_placement_group, placement_group_table, remove_placement_group

    end_actors([trainer] if trainer is not None else [])

    def left() -> list[str]:
        states = placement_group_table().values()
        return [group["name"] for group in states if group["name"].startswith(POOL) and group["state"] != "REMOVED"]

    end = time.monotonic() + limit
    while names := left():
        for name in names:
            with contextlib.suppress(ValueError):
                remove_placement_group(get_placement_group(name))
        if time.monotonic() > end:
            raise DeadlineError(f"the placement groups {names} are not gone after {limit:g} s")
        time.sleep(0.1)


def _error_of(ref: Any) -> BaseException | None:
    import ray

    try:
        ray.get(ref)
    except Exception as error:
        return error
    return None


def _outcome(ref: Any) -> Any:
    """The value of a finished call to the hub; nothing where the hub died over it."""
    import ray

    with contextlib.suppress(Exception):
        return ray.get(ref)
    return None


# -- are the patches where they are needed? -------------------------------------------------------------------------


def check_patches(runner: Any) -> None:
    """Raises AttachError unless every role of the job runs the patched methods."""
    components = runner.components
    rollouter = components["rollouter"]
    roles = {
        "the trainer": (components["trainer"], "fully_async_trainer", ""),
        "the rollouter": (rollouter, "fully_async_rollouter", ""),
        "the queue": (components["message_queue"], "message_queue", ""),
        "the trainer's weight manager": (components["trainer"], "base", "checkpoint_manager"),
    }
    for number, worker in enumerate(ask_now(rollouter.__ray_call__.remote(agent_workers), START_S)):
        roles[f"agent loop worker {number}"] = (worker, "llm_server", "llm_client")
    for where, (actor, tail, attribute) in roles.items():
        module = next(name for name in SEAMS if name.endswith("." + tail))
        wanted = [name for name in targets(module) if not name.partition(":")[2].startswith("MessageQueueClient")]
        methods = [name.rpartition(".")[2] for name in wanted]
        found = ask_now(actor.__ray_call__.remote(patched, attribute, methods), START_S)
        assert_applied(wanted, [name for name in wanted if name.rpartition(".")[2] in found], where=where)


def agent_workers(rollouter: Any) -> list[Any]:
    """Runs inside the rollouter."""
    return list(rollouter.async_rollout_manager.agent_loop_workers)


def patched(actor: Any, attribute: str, methods: list[str]) -> list[str]:
    """Runs inside an actor: which of the methods of it, or of what it holds as `attribute`, are patched."""
    kinds = type(getattr(actor, attribute) if attribute else actor).__mro__
    return [name for name in methods if any(hasattr(vars(kind).get(name), MARK) for kind in kinds)]
