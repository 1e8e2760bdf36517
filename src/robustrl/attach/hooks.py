"""Callbacks after the import of a module, whoever imports it and whenever.

A framework's modules are heavy and are imported in many processes; an adapter must not import them to patch them. It
says what it wants done once a module is there, and pays only where the framework itself imports the module.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from robustrl.errors import AttachError

Callback = Callable[[ModuleType], object]

_callbacks: dict[str, list[Callback]] = {}
_lock = threading.RLock()


def after_import(name: str, callback: Callback) -> Callable[[], None]:
    """Calls `callback(module)` after each execution of the module: now if it is there, else when it is imported.

    The same callback counts once for a module. When it raises, the import fails with what it raised.

    Returns:
        What takes the callback back; what it has done stays.

    Raises:
        AttachError: the module is being imported at this moment, so that its end cannot be seen any more.
    """
    with _lock:
        if callback in _callbacks.get(name, ()):
            return lambda: _forget(name, callback)
        module = sys.modules.get(name)
        if module is not None and getattr(module.__spec__, "_initializing", False):
            raise AttachError(
                f"module {name} is being imported right now",
                why="its callback would see it half-made",
                do="Register before the import begins, or for a module that it imports.",
            )
        _callbacks.setdefault(name, []).append(callback)
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    if module is not None:
        callback(module)
    return lambda: _forget(name, callback)


def _forget(name: str, callback: Callback) -> None:
    with _lock:
        left = [known for known in _callbacks.get(name, ()) if known is not callback]
        if left:
            _callbacks[name] = left
        else:
            _callbacks.pop(name, None)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find the module, and puts itself between it and its loader."""

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        asked: set[str] = self._asking.__dict__.setdefault("names", set())
        if fullname not in _callbacks or fullname in asked:
            return None
        asked.add(fullname)
        try:
            spec = _others_find(self, fullname, path, target)
        finally:
            asked.discard(fullname)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)
        return spec


def _others_find(ours: _Finder, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        if finder is not ours and find is not None and (spec := find(name, path, target)) is not None:
            found: ModuleSpec = spec
            return found
    return None


class _Loader(importlib.abc.Loader):
    """The module's own loader, with the callbacks after it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        # What asks the module for its loader later (resources, pickle, reload) gets its own.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for callback in list(_callbacks.get(module.__name__, ())):
            callback(module)
