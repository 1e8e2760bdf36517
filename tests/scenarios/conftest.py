"""Starts jobs of the rig and sees to it that nothing of them is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rig.job import DETECT, Job, StartJob
from rig.script import Script

from robustrl.config import DetectConfig, RobustConfig


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[StartJob]:
    """Starts jobs of the rig; when the test is over each is ended, and nothing of it may be left."""
    jobs: list[Job] = []

    def start(script: Script, *, detect: DetectConfig = DETECT, **settings: Any) -> Job:
        job = Job(tmp_path / f"run{len(jobs)}-{os.getpid()}", script, RobustConfig(detect=detect, **settings))
        jobs.append(job)
        job.launcher.start()
        return job

    yield start
    for job in jobs:
        job.close()
    for job in jobs:
        job.assert_nothing_left()
