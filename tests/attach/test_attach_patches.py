"""Wrapping patches."""

from __future__ import annotations

import asyncio
import inspect
import shutil
import tempfile
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from robustrl.attach import applied, assert_applied, extend, undo_all, wrap
from robustrl.attach.patches import parameters
from robustrl.errors import AttachError, ConfigError


@pytest.fixture
def host() -> Iterator[ModuleType]:
    """A module of a framework. Its patches are undone afterwards."""
    module = ModuleType("pytest.fake_host")

    class Base:
        def inherited(self, x: int) -> int:
            return x

    class Engine(Base):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def step(self, batch: list[int], scale: float = 1.0) -> float:
            """Steps."""
            return sum(batch) * scale

        async def fetch(self, *, limit: int | None = None) -> str:
            return f"fetched {limit}"

        @classmethod
        def make(cls) -> Engine:
            return cls()

        @staticmethod
        def twice(x: int) -> int:
            return 2 * x

    def free(x: int) -> int:
        return x

    module.Base, module.Engine, module.free = Base, Engine, free  # type: ignore[attr-defined]
    yield module
    undo_all()


def plus_one(wrapped: Any, *args: Any, **kwargs: Any) -> Any:
    return wrapped(*args, **kwargs) + 1


def test_a_method_is_wrapped_with_its_instance_and_put_back(host: Any) -> None:
    before = host.Engine.__dict__["step"]

    def scaled(wrapped: Any, self: Any, batch: list[int], scale: float = 1.0) -> float:
        self.calls.append(batch)
        return float(wrapped(self, batch, scale=10.0))

    patch = wrap(host, "Engine.step", scaled, expect="self, batch, scale=1.0")
    engine = host.Engine()
    assert engine.step([1, 2]) == 30.0
    assert engine.calls == [[1, 2]]
    assert host.Engine.step.__doc__ == "Steps."
    patch.undo()
    patch.undo()
    assert host.Engine.__dict__["step"] is before
    assert applied() == []


def test_async_methods_stay_async(host: Any) -> None:
    async def louder(wrapped: Any, self: Any, *, limit: int | None = None) -> str:
        return str(await wrapped(self, limit=limit)).upper()

    wrap(host, "Engine.fetch", louder, expect="self, *, limit=None")
    assert inspect.iscoroutinefunction(host.Engine.fetch)
    assert asyncio.run(host.Engine().fetch(limit=3)) == "FETCHED 3"


def test_functions_class_and_static_methods_and_inherited_ones(host: Any) -> None:
    wrap(host, "free", plus_one, expect="x")
    wrap(host, "Engine.twice", plus_one, expect="x")
    wrap(host, "Engine.inherited", plus_one, expect="self, x")
    made: list[Any] = []

    def note(wrapped: Any, cls: type) -> Any:
        made.append(cls)
        return wrapped(cls)

    wrap(host, "Engine.make", note, expect="cls")
    assert (host.free(1), host.Engine.twice(2), host.Engine().inherited(1), host.Base().inherited(1)) == (2, 5, 2, 1)
    assert isinstance(host.Engine.make(), host.Engine) and made == [host.Engine]
    undo_all()
    assert (host.free(1), host.Engine.twice(2), host.Engine().inherited(1)) == (1, 4, 1)
    assert "inherited" not in vars(host.Engine)


def test_a_second_time_changes_nothing(host: Any) -> None:
    first = wrap(host, "free", plus_one, expect="x")
    assert wrap(host, "free", plus_one, expect="x") is first
    assert host.free(1) == 2


def test_what_has_moved_is_refused_and_untouched(host: Any) -> None:
    before = host.Engine.__dict__["step"]
    with pytest.raises(AttachError) as refused:
        wrap(host, "Engine.step", plus_one, expect=["self, batch", "self, batch, lr=0.1"])
    text = str(refused.value)
    assert isinstance(refused.value, ConfigError)
    for part in (
        f"pytest {pytest.__version__} has moved",
        "pytest.fake_host:Engine.step",
        "(self, batch) or (self, batch, lr=0.1)",
        "is (self, batch, scale=1.0)",
        "Use a version of pytest",
    ):
        assert part in text
    assert host.Engine.__dict__["step"] is before
    for gone in ("Engine.gone", "Gone.step", "Engine.step.deeper", "Engine.__doc__"):
        with pytest.raises(AttachError, match="has moved"):
            wrap(host, gone, plus_one, expect="self")
    assert applied() == []


def test_one_of_several_known_signatures_is_enough(host: Any) -> None:
    wrap(host, "free", plus_one, expect=["x, y=None", "x"])
    assert host.free(1) == 2


def test_undo_under_someone_elses_patch_is_refused(host: Any) -> None:
    ours = wrap(host, "free", plus_one, expect="x")
    under = host.free
    host.free = lambda x: under(x) * 10
    with pytest.raises(AttachError, match="patched the same place after us"):
        ours.undo()
    assert host.free(1) == 20
    host.free = under
    ours.undo()
    assert host.free(1) == 1


def test_missing_patches_are_named(host: Any) -> None:
    wrap(host, "free", plus_one, expect="x")
    assert_applied(["pytest.fake_host:free"])
    with pytest.raises(AttachError, match=r"not patched in this process: other:Thing\.do"):
        assert_applied(["pytest.fake_host:free", "other:Thing.do"])
    with pytest.raises(AttachError, match=r"not patched in the trainer: pytest\.fake_host:free"):
        assert_applied(["pytest.fake_host:free"], [], where="the trainer")


def test_a_method_can_be_added_where_there_is_none(host: Any) -> None:
    def probe(self: Any) -> str:
        return "well"

    patch = extend(host, "Engine.probe", probe)
    assert extend(host, "Engine.probe", probe) is patch
    assert host.Engine().probe() == "well"
    with pytest.raises(AttachError, match="there already"):
        extend(host, "Engine.step", probe)
    undo_all()
    assert not hasattr(host.Engine, "probe")


def test_signatures_are_written_without_annotations() -> None:
    async def method(self: Any, a: int, /, b: str = "x", *c: int, d: float | None = None, **e: Any) -> str:
        return ""

    assert parameters(method) == "self, a, /, b='x', *c, d=None, **e"


def test_what_is_set_on_a_ray_actor_class_reaches_the_actor(host: Any) -> None:
    """Ray starts actors from a subclass of the class that was decorated."""

    class Modified(host.Engine):  # type: ignore[misc, name-defined, unused-ignore]
        pass

    host.Actor = SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=Modified))
    wrap(host, "Actor.inherited", plus_one, expect="self, x")
    assert Modified().inherited(1) == 2
    assert host.Engine().inherited(1) == 1


def test_a_real_ray_actor_runs_the_patch() -> None:
    """Also with the Ray that is installed: the wrapper travels to the actor's process."""
    ray = pytest.importorskip("ray")
    module = ModuleType("somewhere_else")

    class Counter:
        def add(self, x: int) -> int:
            return x

    module.Counter = ray.remote(num_cpus=0)(Counter)  # type: ignore[attr-defined]
    wrap(module, "Counter.add", lambda wrapped, self, x: wrapped(self, x) + 1, expect="self, x")
    folder = tempfile.mkdtemp(prefix="rr", dir="/tmp")  # Ray's sockets need a short name
    options = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 80_000_000}
    try:
        ray.init(num_cpus=1, _node_ip_address="127.0.0.2", _temp_dir=folder, **options)
        assert ray.get(module.Counter.remote().add.remote(1), timeout=60) == 2  # type: ignore[attr-defined]
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        undo_all()
