"""Calls something once a module has been imported, however that comes about."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final

_wanted: Final[dict[str, str]] = {}


def after_import(module: str, action: str) -> None:
    """Calls `action` ("module:function") with `module` once that is imported; at once if it is."""
    if module in sys.modules:
        _call(action, sys.modules[module])
        return
    _wanted[module] = action
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _call(action: str, module: ModuleType) -> None:
    place, _, name = action.partition(":")
    getattr(importlib.import_module(place), name)(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = _wanted.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if action else None
        if spec is None or spec.loader is None or action is None:
            return None
        spec.loader = _Loader(spec.loader, action)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, real: importlib.abc.Loader, action: str) -> None:
        self.real, self.action = real, action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps the loader that it would have had: others ask it for resources and sources.
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self.real
        self.real.exec_module(module)
        _call(self.action, module)
