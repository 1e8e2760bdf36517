"""Our flags, taken out of a framework's command line before the framework sees it.

Both spellings that frameworks use are ours too: ``robustrl.restart.budget=5`` (with hydra's ``+``) and
``--robustrl.restart.budget 5``.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from robustrl.config import RobustConfig
from robustrl.errors import ConfigError

PREFIX: Final = "robustrl."
_OWN: Final = {"enable": "whether to attach at all", "run": "the run's folder", "config": "a file with settings"}


class Flags(msgspec.Struct, frozen=True):
    """What the command line says."""

    config: RobustConfig
    rest: tuple[str, ...]
    """What is left for the framework."""
    enable: bool = True
    run: str | None = None


def extract(argv: Sequence[str]) -> Flags:
    """Takes every ``robustrl.*`` flag out of `argv`. The last word about a setting counts.

    Raises ConfigError for an unknown name (with the nearest known one), a value of a wrong type, a flag without a
    value, or a contradiction.
    """
    found: dict[str, Any] = {}
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        dashed = word.startswith("--" + PREFIX)
        bare = word[2:] if dashed else word.lstrip("+")
        if not bare.startswith(PREFIX):
            rest.append(word)
            continue
        name, equals, value = bare[len(PREFIX) :].partition("=")
        name = name.replace("-", "_")
        if not equals:
            if dashed and words and not words[0].startswith("-"):
                value = words.pop(0)
            elif dashed and name == "enable":
                value = "true"
            else:
                raise ConfigError(f"the flag {word} has no value", do=f"Write {PREFIX}{name}=VALUE.")
        _check_name(name)
        found[name] = _value(value)
    base = RobustConfig()
    own = {name: found.pop(name) for name in list(found) if name in _OWN}
    if (file := own.get("config")) is not None:
        base = RobustConfig.from_file(Path(str(file)))
    enable = own.get("enable", True)
    if not isinstance(enable, bool):
        raise ConfigError(f"{PREFIX}enable must be true or false", why=f"it is {enable!r}")
    run = own.get("run")
    return Flags(base.with_flags(found), tuple(rest), enable, None if run is None else str(run))


def known_names() -> list[str]:
    """Every name that a flag may have, without the prefix."""
    names = list(_OWN)

    def walk(tree: dict[str, Any], path: str) -> None:
        for key, value in tree.items():
            if isinstance(value, dict) and value:
                walk(value, f"{path}{key}.")
            else:
                names.append(path + key)

    walk(msgspec.to_builtins(RobustConfig()), "")
    return names


def _check_name(name: str) -> None:
    known = known_names()
    if name in known:
        return
    near = difflib.get_close_matches(name, known, 1, 0.5)
    raise ConfigError(
        f"there is no flag {PREFIX}{name}",
        do=f"Did you mean {PREFIX}{near[0]}?" if near else "`robustrl run --help` says where they are listed.",
    )


def _value(text: str) -> Any:
    """A number, true, false, null or JSON where it reads as such, else the text."""
    plain = text.strip()
    lowered = plain.lower()
    try:
        return msgspec.json.decode(lowered if lowered in ("true", "false", "null") else plain)
    except msgspec.DecodeError:
        return None if lowered == "none" else plain
