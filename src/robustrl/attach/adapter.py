"""What an adapter offers, and how it is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Final, Protocol, runtime_checkable

from robustrl.errors import AttachError

GROUP: Final = "robustrl.adapters"


@runtime_checkable
class Adapter(Protocol):
    """An adapter's module has these functions. Importing it imports nothing of the framework."""

    def environment(self) -> dict[str, str]:
        """What the framework's processes need in their environment so that the adapter is loaded in each."""
        ...

    def install(self) -> None:
        """Registers the callbacks that patch the framework. Nothing happens the second time."""
        ...

    def entry(self, module: str, argv: Sequence[str]) -> Callable[[], object]:
        """Makes ready to run a module of the framework, and returns what runs it.

        Sets ``sys.argv`` and checks that the patches which this process needs are in place.
        """
        ...


def find_adapter(package: str) -> Adapter:
    """The adapter for a framework's package. Raises AttachError when there is none, or it cannot be imported."""
    points = {point.name: point for point in metadata.entry_points(group=GROUP)}
    if package not in points:
        raise AttachError(
            f"there is no adapter for {package!r}",
            why=f"there are adapters for {', '.join(sorted(points)) or 'nothing'}",
            do="Install robustrl with the framework's extra, or attach the loop with robustrl.guard.",
        )
    try:
        found = points[package].load()
    except ImportError as error:
        raise AttachError(f"the adapter for {package} cannot be imported", why=str(error)) from error
    if not isinstance(found, Adapter):
        raise AttachError(f"{points[package].value} is not an adapter")
    return found
