"""Ray for a benchmark: a folder of its own, nothing kept.

To be started where nobody but Ray is, for it listens on every interface.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"


class PrivateRay:
    """Subclasses make their actors in `begin`, and say what they are asked."""

    def start(self, store_bytes: int, **arguments: Any) -> None:
        """Starts Ray, then calls `begin` with the other arguments; ends Ray again when that fails."""
        here = str(Path(__file__).parent)  # Ray's workers import the actors' modules as well
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"})
        import ray

        self.ray = ray
        self.folder = tempfile.mkdtemp(prefix="rrbench-")
        try:
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=store_bytes,
                log_to_driver=False,
                _node_ip_address=LOOPBACK,
                _temp_dir=self.folder,
            )
            self.begin(**arguments)
        except BaseException:
            self.stop()
            raise

    def begin(self, **arguments: Any) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self.ray.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
