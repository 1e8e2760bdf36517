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
from robustrl.reconnect import transports

NEEDS_UCX = pytest.mark.skipif(not importlib.util.find_spec("ucxx"), reason="needs ucxx")


NEEDS_NIXL = pytest.mark.skipif(not transports.nixl_installed(), reason="needs NIXL (robustrl[nixl])")
TRANSPORTS = ["tcp", pytest.param("ucx", marks=NEEDS_UCX), "shm", pytest.param("nixl", marks=NEEDS_NIXL)]


@pytest.fixture(params=TRANSPORTS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    # One bucket at a time: what is lost at bucket 5 has not been read ahead.
    config = ReconnectConfig(transport=request.param, chunk_bytes=BUCKET, timeout_s=PEER_LIMIT_S, credits=1)
    rig = Rig(config)
    yield rig
    rig.close()
