"""These tests run in a framework's own environment (`make test-verl`); elsewhere they are not collected."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from installed import SOURCES

FRAMEWORKS = ("verl",)


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


collect_ignore = [str(Path(__file__).parent / name) for name in FRAMEWORKS if not _is_installed(name)]

# The environments hold frameworks only: what is tested is the clone's.
sys.path[:0] = map(str, SOURCES)
