"""The toy reward."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """One point for the right number, and a little for each letter e, so that rewards differ within a group."""
    text = solution_str or ""
    return float(ground_truth in text) + min(1.0, text.count("e") / 8)
