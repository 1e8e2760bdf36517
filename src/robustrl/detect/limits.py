"""How long each phase of each role may go without progress."""

from __future__ import annotations

from typing import Final

from robustrl.config import DetectConfig
from robustrl.roles import Phase, Role

DEFAULTS: Final[dict[str, float]] = {
    Phase.INIT: 600.0,
    Phase.GENERATE: 60.0,
    Phase.TOOL: 600.0,
    Phase.SYNC: 120.0,
    Phase.TRAIN: 300.0,
    Phase.CHECKPOINT: 600.0,
    Phase.EVALUATE: 1800.0,
}
"""Seconds. The trainer's and the rollout's are RobustRL's windows (arXiv 2512.22492: 5 minutes and 60 s); a phase
that is not listed, such as ``wait`` and ``idle``, has no limit: nothing is due in it."""


class Limits:
    """Looks up ``role.phase`` first, then ``phase``, in the configuration and then in the defaults."""

    def __init__(self, config: DetectConfig) -> None:
        self.silence_s = config.silence_s
        self.start_s = config.start_s
        self._configured = config.limits

    def progress_s(self, role: Role, phase: str) -> float | None:
        """Seconds without progress allowed in the phase; None when the phase has no limit."""
        for table in (self._configured, DEFAULTS):
            for name in (f"{role}.{phase}", phase):
                if name in table:
                    return table[name]
        return None
