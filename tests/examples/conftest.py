"""The examples are run from their folder; tests import them as their processes do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
