"""What every process of an attached job is told: the settings and the run folder, through its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import msgspec

from robustrl.config import RobustConfig
from robustrl.errors import AttachError
from robustrl.events import EventLog
from robustrl.wire import Secret

ENV: Final = "ROBUSTRL_ATTACH"
RUN_DIR: Final = "ROBUSTRL_RUN_DIR"
"""Set too, because it is how processes of a run are found again when it is over."""


class Session(msgspec.Struct, frozen=True):
    """An attached job. The run folder holds the events and the job's secret; every machine of the job must see it."""

    adapter: str
    """The framework's package, for `find_adapter`."""
    run: str
    config: RobustConfig = RobustConfig()

    @property
    def folder(self) -> Path:
        return Path(self.run)

    def environment(self) -> dict[str, str]:
        """What a process of the job must have in its environment. The secret stays in its file."""
        return {ENV: msgspec.json.encode(self).decode(), RUN_DIR: self.run}

    @classmethod
    def current(cls, env: Mapping[str, str] = os.environ) -> Self | None:
        """The session that this process belongs to, if any. Raises AttachError for one that cannot be read."""
        text = env.get(ENV)
        if not text:
            return None
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise AttachError(f"the environment variable {ENV} cannot be read", why=str(error)) from error

    @property
    def secret_path(self) -> Path:
        return self.folder / "secret"

    def secret(self) -> Secret:
        """Raises ConfigError when the file is not there for us."""
        return Secret.read(self.secret_path)

    def events(self, by: object) -> EventLog:
        """The run's event log, for the identity `by`."""
        return EventLog(self.folder / "events.jsonl", by)
