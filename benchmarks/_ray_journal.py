"""The Ray actors of the ledger's benchmark, alone in their module: Ray's workers import it."""

from __future__ import annotations

import pickle
import time
from typing import Any


class RayJournal:
    """Keeps what it is given in memory."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], list[bytes]] = {}

    def add(self, records: list[tuple[tuple[int, int], bytes]]) -> int:
        for place, record in records:
            self.kept.setdefault(place, []).append(record)
        return len(records)


class RayWriter:
    def __init__(self, journal: Any) -> None:
        self.journal = journal

    def ready(self) -> bool:
        return True

    def write(self, seconds: float, trajectories: int, flush_tokens: int) -> tuple[int, float]:
        import ray

        began = time.monotonic()
        tokens = start = 0
        while time.monotonic() - began < seconds:
            ids: list[list[int]] = [[] for _ in range(trajectories)]
            for position in range(start, start + flush_tokens):
                for sample in range(trajectories):
                    ids[sample].append(position)
            records = [
                (
                    (id(self), sample),
                    pickle.dumps({"start": start, "ids": ids[sample], "logprobs": [-1.0] * flush_tokens}),
                )
                for sample in range(trajectories)
            ]
            ray.get(self.journal.add.remote(records), timeout=60)
            tokens += flush_tokens * trajectories
            start += flush_tokens
        return tokens, time.monotonic() - began
