"""Callbacks after an import."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from robustrl.attach import after_import
from robustrl.errors import AttachError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``hooked`` with a module ``hooked.inner``; forgotten afterwards."""
    root = tmp_path / "hooked"
    root.mkdir()
    (root / "__init__.py").write_text("value = 1\n")
    (root / "inner.py").write_text("value = 2\n")
    (root / "data.txt").write_text("data")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield root
    for name in [name for name in sys.modules if name.partition(".")[0] == "hooked"]:
        del sys.modules[name]


def test_a_callback_sees_the_finished_module(package: Path) -> None:
    seen: list[int] = []
    forget = after_import("hooked.inner", lambda module: seen.append(module.value))
    importlib.import_module("hooked")
    assert seen == []
    importlib.import_module("hooked.inner")
    forget()
    assert seen == [2]


def test_a_module_that_is_there_is_called_back_at_once(package: Path) -> None:
    importlib.import_module("hooked.inner")
    seen: list[str] = []
    after_import("hooked.inner", lambda module: seen.append(module.__name__))()
    assert seen == ["hooked.inner"]


def test_the_same_callback_counts_once_and_others_come_in_order(package: Path) -> None:
    seen: list[str] = []

    def first(module: ModuleType) -> None:
        seen.append("first")

    forgets = [
        after_import("hooked", first),
        after_import("hooked", first),
        after_import("hooked", lambda m: seen.append("second")),
    ]
    importlib.import_module("hooked")
    for forget in forgets:
        forget()
    assert seen == ["first", "second"]


def test_a_reload_is_called_back_again(package: Path) -> None:
    seen: list[int] = []
    forget = after_import("hooked.inner", lambda module: seen.append(module.value))
    module = importlib.import_module("hooked.inner")
    (package / "inner.py").write_text("value = 33\n")
    importlib.reload(module)
    forget()
    assert seen == [2, 33]


def test_a_forgotten_callback_is_not_called(package: Path) -> None:
    seen: list[str] = []
    after_import("hooked", lambda module: seen.append("called"))()
    importlib.import_module("hooked")
    assert seen == []


def test_the_module_keeps_its_own_loader(package: Path) -> None:
    from importlib import resources

    forget = after_import("hooked", lambda module: None)
    module = importlib.import_module("hooked")
    forget()
    assert module.__spec__ is not None
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert module.__loader__ is module.__spec__.loader
    assert (resources.files("hooked") / "data.txt").read_text() == "data"


def test_a_callback_that_raises_fails_the_import(package: Path) -> None:
    def refuse(module: ModuleType) -> None:
        raise AttachError("not this one")

    forget = after_import("hooked", refuse)
    with pytest.raises(AttachError, match="not this one"):
        importlib.import_module("hooked")
    forget()
    assert "hooked" not in sys.modules


def test_a_module_in_the_middle_of_its_import_is_refused(package: Path) -> None:
    (package / "__init__.py").write_text(
        "from robustrl.attach import after_import\nafter_import('hooked', lambda module: None)\n"
    )
    with pytest.raises(AttachError, match="imported right now"):
        importlib.import_module("hooked")


def test_a_missing_module_stays_missing() -> None:
    forget = after_import("hooked_nowhere", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="hooked_nowhere"):
        importlib.import_module("hooked_nowhere")
    forget()


def test_a_ray_worker_is_called_back_when_it_unpickles(tmp_path: Path) -> None:
    """What a worker imports because an object that it is given needs it is seen as any other import."""
    (tmp_path / "late.py").write_text("def made():\n    return 'plain'\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import pickle, sys
            from robustrl.attach import after_import, wrap
            after_import("late", lambda m: wrap(m, "made", lambda wrapped: wrapped() + "+ours", expect=""))
            assert "late" not in sys.modules
            print(pickle.loads(b"clate\\nmade\\n.")())
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "plain+ours", done.stderr
