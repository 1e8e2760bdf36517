"""A folder for PYTHONPATH that makes a source tree look installed: packages and entry points, in milliseconds."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
"""The clone."""
SOURCES: Final = (ROOT / "src", ROOT / "adapters")

EntryPoints = Mapping[str, Mapping[str, str]]


def announce(site: Path, name: str, version: str, entry_points: EntryPoints) -> None:
    """Writes ``NAME-VERSION.dist-info`` into `site`; the package itself is found further along the path."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines: list[str] = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))


def install_robustrl(site: Path) -> list[Path]:
    """robustrl as its pyproject.toml declares it, and its command in ``site/bin``. Returns folders for PYTHONPATH."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    announce(site, project["name"], project["version"], project["entry-points"])
    script = site / "bin" / "robustrl"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!{sys.executable}\nfrom robustrl.cli import main\nmain()\n")
    script.chmod(0o755)
    return [site, *SOURCES]
