"""The scenarios' rig on every transport that runs here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # weights_rig lies there

from weights_fleet import BUCKET, PEER_LIMIT_S
from weights_rig import Rig

from robustrl.config import ReconnectConfig

NEEDS_UCX = pytest.mark.skipif(not importlib.util.find_spec("ucxx"), reason="needs ucxx")


@pytest.fixture(params=["tcp", pytest.param("ucx", marks=NEEDS_UCX), "shm"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(ReconnectConfig(transport=request.param, chunk_bytes=BUCKET, timeout_s=PEER_LIMIT_S))
    yield rig
    rig.close()
