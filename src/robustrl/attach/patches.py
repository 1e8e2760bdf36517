"""Wrapping patches: a method of the framework is wrapped, never copied, and only while it is what we knew.

Each patch names the signature that it was written for. Where the framework has moved, nothing is changed and the error
says what was expected and what is there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from importlib import metadata
from types import ModuleType
from typing import Any, Final

import msgspec

from robustrl.errors import AttachError

MARK: Final = "__robustrl_patch__"

Wrapper = Callable[..., Any]
"""``wrapper(wrapped, *args, **kwargs)``; of a method, `args` begins with the instance. Async for what is async."""

TRACE: Final = "_ray_trace_ctx"
"""A parameter that Ray adds to every method of an actor class; wrappers are spared it."""

_patches: dict[str, Patch] = {}


class Patch(msgspec.Struct, frozen=True):
    """A patch that is in place."""

    target: str
    """``module:Class.method``."""
    holder: Any
    """What the attribute is set on."""
    attribute: str
    before: Any
    """What was in the holder's own namespace, or `_INHERITED`."""
    after: Any

    def undo(self) -> None:
        """Puts back what was there. Nothing happens if that was done before.

        Raises AttachError when someone else has patched over it since; theirs would go with ours.
        """
        if _patches.get(self.target) is not self:
            return
        if inspect.getattr_static(self.holder, self.attribute, None) is not self.after:
            raise AttachError(
                f"the patch of {self.target} cannot be undone",
                why="something else has patched the same place after us",
                do="Undo that one first.",
            )
        if self.before is _INHERITED:
            delattr(self.holder, self.attribute)
        else:
            setattr(self.holder, self.attribute, self.before)
        del _patches[self.target]


_INHERITED: Final = object()


def wrap(module: ModuleType, path: str, wrapper: Wrapper, *, expect: str | Iterable[str]) -> Patch:
    """Wraps ``module.<path>``, a function or a method, also one of a class that Ray has made an actor class of.

    A second call for the same place does nothing and returns the first patch.

    Args:
        path: ``function`` or ``Class.method``.
        wrapper: see `Wrapper`.
        expect: the parameters that it was written for, without annotations, as in ``"self, global_steps=None"``; or
            several such texts, of several versions.

    Raises:
        AttachError: the place does not exist, or has other parameters. Nothing was changed.
    """
    target = f"{module.__name__}:{path}"
    expected = [expect] if isinstance(expect, str) else list(expect)
    holder, attribute = _holder(module, path, target, expected)
    raw = inspect.getattr_static(holder, attribute, None)
    known = _patches.get(target)
    if known is not None and known.holder is holder and raw is known.after:
        return known
    plain = raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw
    if not inspect.isfunction(plain):
        raise _moved(module, target, expected, "nothing that can be called" if plain is None else repr(type(plain)))
    found = parameters(plain)
    if found not in expected:
        raise _moved(module, target, expected, f"({found})")
    after: Any = _around(plain, wrapper)
    setattr(after, MARK, target)
    if isinstance(raw, (classmethod, staticmethod)):
        after = type(raw)(after)
    before = vars(holder).get(attribute, _INHERITED)
    setattr(holder, attribute, after)
    patch = Patch(target, holder, attribute, before, after)
    _patches[target] = patch
    return patch


def extend(module: ModuleType, path: str, function: Callable[..., Any]) -> Patch:
    """Adds a method ``Class.name`` to a class of the framework. A second call for the same place does nothing.

    Raises AttachError where the class does not exist, or has such a method already.
    """
    target = f"{module.__name__}:{path}"
    holder, attribute = _holder(module, path, target, ["a new name"])
    known = _patches.get(target)
    if known is not None and known.holder is holder and vars(holder).get(attribute) is function:
        return known
    if hasattr(holder, attribute):
        raise _moved(module, target, ["a new name"], "there already")
    setattr(holder, attribute, function)
    patch = Patch(target, holder, attribute, _INHERITED, function)
    _patches[target] = patch
    return patch


def parameters(function: Callable[..., Any]) -> str:
    """The parameters of a function as `wrap` expects them to be written: no annotations."""
    signature = inspect.signature(function)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in signature.parameters.items()
        if name != TRACE
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))[1:-1]


def applied() -> list[str]:
    """The places that are patched in this process, as ``module:Class.method``."""
    return sorted(_patches)


def assert_applied(targets: Iterable[str], found: Iterable[str] | None = None, *, where: str = "this process") -> None:
    """Raises AttachError unless each of `targets` is patched.

    Args:
        targets: as `applied` names them.
        found: what is patched in another process, as it says; default: what is patched here.
        where: that process, for the message.
    """
    missing = sorted(set(targets) - set(applied() if found is None else found))
    if missing:
        raise AttachError(
            f"not patched in {where}: {', '.join(missing)}",
            why="the adapter was not loaded there; frameworks pass over errors of plugins in silence",
            do="Is robustrl installed on every machine of the job, with the framework's extra?",
        )


def undo_all() -> None:
    """Undoes every patch of this process, the newest first."""
    for patch in reversed(list(_patches.values())):
        patch.undo()


def _holder(module: ModuleType, path: str, target: str, expected: list[str]) -> tuple[Any, str]:
    *outer, attribute = path.split(".")
    holder: Any = module
    for name in outer:
        holder = getattr(holder, name, None)
        if holder is None:
            raise _moved(module, target, expected, f"no {name}")
    # Ray starts an actor from a subclass of what was decorated; only what is set there reaches the actor.
    actor_class = getattr(holder, "__ray_metadata__", None)
    return (holder if actor_class is None else actor_class.modified_class), attribute


def _around(function: Callable[..., Any], wrapper: Wrapper) -> Callable[..., Any]:
    # Whoever asks whether the method is async (Ray does, to choose the kind of actor) must get the same answer.
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def patched_async(*args: Any, **kwargs: Any) -> Any:
            return await wrapper(_traced(function, kwargs), *args, **kwargs)

        return patched_async

    @functools.wraps(function)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrapper(_traced(function, kwargs), *args, **kwargs)

    return patched


def _traced(function: Callable[..., Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Moves Ray's own argument from what the wrapper sees to what it wraps."""
    return functools.partial(function, **{TRACE: kwargs.pop(TRACE)}) if TRACE in kwargs else function


def _moved(module: ModuleType, target: str, expected: list[str], found: str) -> AttachError:
    package = module.__name__.partition(".")[0]
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    wanted = " or ".join(f"({text})" for text in expected)
    return AttachError(
        f"{package} {version} has moved: {target} was expected as {wanted}, and is {found}",
        why="this patch was written for another version; nothing of it was changed",
        do=f"Use a version of {package} that robustrl's documentation names, or a newer robustrl.",
    )
