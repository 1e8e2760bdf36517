"""What a member's own code holds: it attaches the process to the job and says what the process is doing."""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from robustrl import events
from robustrl.config import RobustConfig
from robustrl.detect import ProgressCell
from robustrl.errors import ConfigError, FencedError, JobFailedError, RobustError
from robustrl.reconnect import DirectoryClient, WeightSubscriber
from robustrl.restart.supervisor import cell_path
from robustrl.roles import Identity, Member, Phase, Role
from robustrl.runtime.follower import WeightFollower
from robustrl.runtime.link import Link
from robustrl.runtime.loop import shared_loop
from robustrl.wire import Address, Secret

ATTACH_SECONDS = 60.0
FAREWELL_SECONDS = 10.0


class Place:
    """Where in which job this process stands, as its environment says."""

    def __init__(self, run_dir: Path, identity: Identity, supervisor: Address) -> None:
        self.run_dir = run_dir
        self.identity = identity
        self.supervisor = supervisor

    @classmethod
    def from_env(cls) -> Place:
        try:
            return cls(
                Path(os.environ["ROBUSTRL_RUN_DIR"]),
                Identity(Member.parse(os.environ["ROBUSTRL_MEMBER"]), int(os.environ["ROBUSTRL_INCARNATION"])),
                Address.parse(os.environ["ROBUSTRL_SUPERVISOR"]),
            )
        except KeyError as error:
            raise ConfigError(
                "this process is not a member of a job",
                why=f"{error.args[0]} is not set",
                do="Members are started by robustrl (`robustrl demo`, or a runtime.Launcher of your own).",
            ) from error

    def become(self, identity: Identity) -> None:
        """Takes another member's place: a standby was promoted."""
        os.environ["ROBUSTRL_MEMBER"] = str(identity.member)
        os.environ["ROBUSTRL_INCARNATION"] = str(identity.incarnation)


class Guard:
    """A member of the job, as a context manager. The subclasses add what each role does.

    Entering attaches to the supervisor. Leaving says ``finished``, or, with an exception, tells the supervisor what
    happened; a member that ends without either has failed, whatever its exit code.
    """

    role: Role = ""

    def __init__(self) -> None:
        self.place = Place.from_env()
        self.identity = self.place.identity
        if self.role and self.identity.member.role != self.role:
            raise ConfigError(
                f"this code guards a {self.role}", who=self.identity, why="the job started the process in another role"
            )
        self.log = events.EventLog(self.place.run_dir / "events.jsonl", self.identity)
        self.emit = self.log.emit
        self.secret = Secret.read(self.place.run_dir / "secret")
        self.cell = ProgressCell(cell_path(self.place.run_dir, self.identity))
        self.step = 0
        """Optimizer steps that are done, as far as this member knows."""
        self._loop = shared_loop()
        self._phases: list[str] = [Phase.INIT]
        self._said: tuple[str, int] | None = None
        self._reported = threading.Event()
        self._handed_over = False
        self.link = Link(self.identity, self.place.supervisor, self.secret, self._beat, self.emit)

    # -- attach and leave ------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._say_phase(Phase.INIT)
        self._loop.run(self.link.start(), ATTACH_SECONDS)
        self._loop.run(self.link.say("attached"), ATTACH_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._handed_over:
                pass
            elif error is None or (isinstance(error, SystemExit) and not error.code):
                self._leave()
                self._loop.run(self.link.call("member.finished", timeout=FAREWELL_SECONDS), FAREWELL_SECONDS + 1)
            elif isinstance(error, JobFailedError):
                if self.link.failure is None:  # it is no echo of the supervisor's word: the supervisor has to hear it
                    self._loop.run(
                        self.link.call("job.give_up", cause=str(error), timeout=FAREWELL_SECONDS), FAREWELL_SECONDS + 1
                    )
            elif not isinstance(error, FencedError):
                self.report(error)
        except RobustError:
            # The exception in hand matters more than a farewell that nobody heard.
            if error is None and not self.link.stopping:
                raise
        finally:
            self._detach()

    def _leave(self) -> None:
        """What a role still has to do before it may say that it has finished."""

    def _detach(self) -> None:
        """Closes what the guard opened."""
        try:
            self._loop.run(self.link.close(), FAREWELL_SECONDS)
        finally:
            self.log.close()

    def follower(self) -> WeightFollower:
        """A follower of the trainer's weights for this member, not started yet."""
        subscriber = WeightSubscriber(
            self.identity, DirectoryClient(self.link.call), self.config.reconnect, self.secret, self.emit
        )
        self.link.on_connect.append(subscriber.reannounce)
        return WeightFollower(subscriber, self.config.reconnect.keep_versions)

    def hand_over(self) -> None:
        """Leaving will say nothing: the process goes on as another member."""
        self._handed_over = True

    def report(self, error: BaseException) -> None:
        """Tells the supervisor that this member failed, with the traceback. Only the first report counts."""
        if self._reported.is_set():
            return
        self._reported.set()
        text = "".join(traceback.format_exception(error)).strip()
        self._loop.run(self.link.call("member.failed", what=text, timeout=FAREWELL_SECONDS), FAREWELL_SECONDS + 1)

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Makes a background task's exception the member's failure, instead of a line that nobody awaits."""

        def done(ended: asyncio.Task[Any]) -> None:
            if ended.cancelled():
                return
            error = ended.exception()
            if error is not None:
                # From a thread: the task's loop must not wait for ours.
                threading.Thread(target=self.report, args=(error,), daemon=True).start()

        task.add_done_callback(done)

    # -- what it is doing ------------------------------------------------------------------------------------------

    @property
    def config(self) -> RobustConfig:
        """The job's configuration, as the supervisor told it."""
        return self.link.config

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Declares what the member does inside the block; blocks nest."""
        self._phases.append(name)
        self._say_phase(name)
        try:
            yield
        finally:
            self._phases.pop()
            self.cell.move()

    @property
    def stopping(self) -> bool:
        """Whether the job is ending: a loop should come to its end."""
        return self.link.stopping

    def check(self) -> None:
        """Raises JobFailedError, with the first cause, when the job was given up."""
        if self.link.failure is not None:
            raise self.link.failure

    def _say_phase(self, name: str) -> None:
        # Leaving a block is not said: the phase that follows says it, and the log stays small.
        step = self.cell.step
        if (name, step) == self._said:
            return
        self._said = (name, step)
        self.emit(
            events.PhaseEntered(
                member=str(self.identity.member),
                incarnation=self.identity.incarnation,
                phase=name,
                step=step,
            )
        )

    def _beat(self) -> dict[str, Any]:
        counted = self.cell.read()
        return {"phase": self._phases[-1], "step": counted.step, "moves": counted.moves, "active": counted.active}
