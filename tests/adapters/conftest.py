"""A small Ray for tests of adapters: on loopback, with a folder of its own that goes with it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from robustrl.attach import Session
from robustrl.config import RobustConfig
from robustrl.wire import Secret

LIMITS = {"rollout.ping": 4.0, "rollout.engine": 3.0}


@pytest.fixture
def attached_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Ray, and a session as `robustrl run` makes it; the run's folder."""
    ray = pytest.importorskip("ray")
    run = tmp_path / "run"
    run.mkdir()
    session = Session("verl", str(run), RobustConfig.from_dict({"detect": {"limits": LIMITS}}))
    Secret.create(session.secret_path)
    for name, value in session.environment().items():
        monkeypatch.setenv(name, value)
    # Ray puts unix sockets into its folder, whose names must be short.
    folder = tempfile.mkdtemp(prefix="rr", dir="/tmp")
    try:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            _node_ip_address="127.0.0.2",
            _temp_dir=folder,
            log_to_driver=False,
            object_store_memory=80_000_000,
            runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},
        )
        yield run
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
