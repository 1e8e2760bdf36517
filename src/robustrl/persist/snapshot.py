"""Trainer snapshots: frozen in host memory, then written in the background as points that are whole or not there.

A point is a folder ``point-STEP.N`` (N counts the times that this step was saved: a trainer that went back saves it
again). It is written under a temporary name, synced, renamed, and then the file ``NEWEST`` is moved to it: the
pointer never runs ahead of the data. Its manifest holds a digest of each file; nothing is loaded that does not match.

State is written by `torch.save` and read with ``weights_only``: nothing is unpickled that could run code.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from robustrl import events
from robustrl.errors import ConfigError, MissingDependencyError, SnapshotError

FORMAT: Final = 1
STATE_FILE: Final = "state.pt"
MANIFEST_FILE: Final = "manifest.json"
POINTER_FILE: Final = "NEWEST"
_READ_BYTES: Final = 1 << 20
_POINT = re.compile(r"point-(\d{1,12})\.(\d{1,6})")
_TEMPORARY: Final = "tmp-"


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("snapshots need torch", do="Install robustrl[torch].") from error
    return torch


class Frozen(NamedTuple):
    """Trainer state in host memory, which the trainer's further steps do not touch."""

    state: dict[str, Any]
    rng: dict[str, Any]
    blocking_s: float
    """How long `freeze` kept the trainer."""


class Point(msgspec.Struct, frozen=True):
    """A verified durable point on disk."""

    path: str
    step: int
    bytes: int
    extra: dict[str, Any]
    """What the saver put beside the state: plain JSON values."""


class Loaded(NamedTuple):
    step: int
    state: dict[str, Any]
    rng: dict[str, Any]
    extra: dict[str, Any]


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    step: int
    files: dict[str, _File]
    extra: dict[str, Any]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    bytes: int
    xxh3_128: str


class Snapshotter:
    """Keeps a trainer's durable points in one folder. One trainer writes; others (a standby) may read meanwhile.

    Args:
        folder: where points lie; made when missing.
        keep: verified points that stay.
        emit: takes `PointSaved`, and an `Alarm` for each point that cannot be used.
    """

    def __init__(self, folder: Path | str, keep: int = 3, emit: events.Emit = events.ignore) -> None:
        if keep < 1:
            raise ConfigError("a snapshotter must keep at least one point", why=f"keep is {keep}")
        self.folder = Path(folder)
        self.keep = keep
        self._emit = emit
        self._saving = threading.Lock()
        self._verified: dict[str, Point] = {}
        self._alarmed: set[str] = set()

    # -- freezing ----------------------------------------------------------------------------------------------------

    def freeze(self, state: Mapping[str, Any]) -> Frozen:
        """Copies trainer state to host memory. The only part that blocks the trainer.

        Args:
            state: name -> an object with `state_dict()` (module, optimizer, scheduler), a `torch.Generator`, a tensor,
                or plain data (None, bool, int, float, str, bytes, and lists, tuples and dicts of these and of tensors).

        The generators' states of torch (the CPU, and CUDA where it is in use), of `random`, and of numpy where it is
        imported, are included.

        Raises:
            SnapshotError: a value cannot be kept without pickling it; it is named.
        """
        started = time.monotonic()
        torch = _torch()
        frozen: dict[str, Any] = {}
        for name, value in state.items():
            if isinstance(value, torch.Generator):
                frozen[name] = value.get_state()
            elif hasattr(value, "state_dict"):
                frozen[name] = _copied(value.state_dict(), name, torch)
            else:
                frozen[name] = _copied(value, name, torch)
        rng = _generators(torch)
        return Frozen(frozen, rng, time.monotonic() - started)

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(self, frozen: Frozen, step: int, extra: Mapping[str, Any] | None = None) -> Point:
        """Writes a point and verifies it. Meant for a background thread; one save runs at a time.

        Args:
            frozen: what `freeze` returned.
            step: optimizer steps done.
            extra: JSON values that belong to the point (weight version, ledger frontier, incarnation).

        Raises:
            SnapshotError: it could not be written (a full disk). Nothing of it stays, earlier points are intact.
        """
        started = time.monotonic()
        with self._saving:
            written = self.folder / f"{_TEMPORARY}{step}-{os.getpid()}-{time.monotonic_ns()}"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._remove_leftovers()
                written.mkdir()
                self._write(written, frozen, step, dict(extra or {}))
                target = self.folder / f"point-{step}.{self._next_number(step)}"
                point = msgspec.structs.replace(self._verify(written), path=str(target))
                written = written.rename(target)
                _sync_folder(self.folder)
                self._verified[target.name] = point
                self._point_to(target.name)
            except (OSError, RuntimeError, _DamagedError) as error:
                with contextlib.suppress(OSError):
                    self._remove(written)
                raise SnapshotError(
                    f"the point of step {step} could not be saved in {self.folder}",
                    why=str(error),
                    do="Is the disk full? Earlier points are intact.",
                ) from error
            with contextlib.suppress(OSError):  # what could not be removed now is removed after the next save
                self._prune()
        self._emit(
            events.PointSaved(
                step=step, bytes=point.bytes, blocking_s=frozen.blocking_s, total_s=time.monotonic() - started
            )
        )
        return point

    def _write(self, folder: Path, frozen: Frozen, step: int, extra: dict[str, Any]) -> None:
        torch = _torch()
        with (folder / STATE_FILE).open("xb", buffering=0) as raw:
            file = _HashedFile(raw)
            torch.save({"format": FORMAT, "state": frozen.state, "rng": frozen.rng}, file)
            file.check()
            os.fsync(raw.fileno())
        manifest = _Manifest(FORMAT, step, {STATE_FILE: _File(file.size, file.hash.hexdigest())}, extra)
        _write_synced(folder / MANIFEST_FILE, msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        _sync_folder(folder)

    def _next_number(self, step: int) -> int:
        return max((number for one, number, _ in self._points() if one == step), default=-1) + 1

    def _point_to(self, name: str) -> None:
        temporary = self.folder / f"{_TEMPORARY}{POINTER_FILE}-{os.getpid()}"
        _write_synced(temporary, name.encode() + b"\n")
        temporary.replace(self.folder / POINTER_FILE)
        _sync_folder(self.folder)

    def _remove_leftovers(self) -> None:
        """What an interrupted save left. Only the writer does this: to a reader it may be a save in progress."""
        for path in self.folder.glob(f"{_TEMPORARY}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _prune(self) -> None:
        """Removes all but the `keep` newest verified points; what cannot be read just now is left alone."""
        kept = 0
        for _, _, path in self._points():
            try:
                usable = path.name in self._verified or self._verify(path) is not None
            except _DamagedError:
                usable = False
            except OSError:
                continue
            if usable and kept < self.keep:
                kept += 1
                continue
            if kept == 0:
                continue
            self._remove(path)

    def _remove(self, path: Path) -> None:
        """Removes a folder under a temporary name first: half a point is never taken for one."""
        doomed = path.rename(self.folder / f"{_TEMPORARY}gone-{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        self._verified.pop(path.name, None)

    # -- loading -----------------------------------------------------------------------------------------------------

    def newest(self) -> Point | None:
        """The newest point whose files match their digests, or None. Says each one that had to be passed over."""
        pointed = self._pointed()
        for step, number, path in self._points():
            try:
                point = self._verify(path)
            except (OSError, _DamagedError) as error:
                if not path.exists():
                    continue  # retention removed it while we looked
                if path.name not in self._alarmed:
                    self._alarmed.add(path.name)
                    self._emit(
                        events.Alarm(
                            text=f"the durable point {path.name} cannot be used ({error}); an older one is taken"
                        )
                    )
                continue
            if pointed is not None and pointed > (step, number):
                missing = "point-{}.{}".format(*pointed)
                if missing not in self._alarmed:
                    self._alarmed.add(missing)
                    self._emit(events.Alarm(text=f"the durable point {missing} is missing; {path.name} is taken"))
            return point
        return None

    def load(self, point: Point) -> Loaded:
        """The state of a point, verified again, all tensors on the CPU.

        Raises:
            SnapshotError: it is gone, damaged, or of another format.
        """
        torch = _torch()
        path = Path(point.path)
        try:
            found = self._verify(path)
            data = torch.load(path / STATE_FILE, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, _DamagedError) as error:
            raise SnapshotError(f"the point {path.name} cannot be loaded", why=str(error)) from error
        except Exception as error:  # torch raises pickle.UnpicklingError and others for what it does not trust
            raise SnapshotError(f"the point {path.name} holds what is not plain state", why=str(error)) from error
        return Loaded(found.step, data["state"], data["rng"], found.extra)

    def _points(self) -> list[tuple[int, int, Path]]:
        """(step, number, path) of all points, newest first; in the order of numbers, not of their digits."""
        points = []
        with contextlib.suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                found = _POINT.fullmatch(path.name)
                if found and path.is_dir():
                    points.append((int(found[1]), int(found[2]), path))
        return sorted(points, reverse=True)

    def _pointed(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found = _POINT.fullmatch((self.folder / POINTER_FILE).read_text().strip())
            if found:
                return int(found[1]), int(found[2])
        return None

    def _verify(self, path: Path) -> Point:
        """Reads a point's files and compares them with its manifest. Raises _DamagedError or OSError."""
        try:
            manifest = msgspec.json.decode((path / MANIFEST_FILE).read_bytes(), type=_Manifest)
        except FileNotFoundError as error:
            raise _DamagedError(f"{MANIFEST_FILE} is missing") from error
        except msgspec.MsgspecError as error:
            raise _DamagedError(f"{MANIFEST_FILE} is damaged: {error}") from error
        if manifest.format != FORMAT:
            raise _DamagedError(f"its format is {manifest.format}, this robustrl reads {FORMAT}")
        for name, expected in manifest.files.items():
            try:
                size, digest = _digest(path / name)
            except FileNotFoundError as error:
                raise _DamagedError(f"{name} is missing") from error
            if (size, digest) != (expected.bytes, expected.xxh3_128):
                raise _DamagedError(f"{name} does not match its digest ({size} of {expected.bytes} bytes)")
        total = sum(file.bytes for file in manifest.files.values())
        return Point(str(path), manifest.step, total, manifest.extra)


def restore_into(objects: Mapping[str, Any], loaded: Loaded | Frozen) -> dict[str, Any]:
    """Puts a snapshot back: objects get `load_state_dict`, tensors are overwritten in place, generators are set.

    The process's random generators are set as well, last, so that nothing here draws from them.

    Returns:
        The plain values among `objects`' names, which cannot be changed in place.

    Raises:
        SnapshotError: the snapshot and `objects` do not have the same names, or a tensor has another shape or dtype.
    """
    torch = _torch()
    if set(objects) != set(loaded.state):
        raise SnapshotError(
            "the snapshot holds other state than this trainer has",
            why=f"only in the snapshot: {sorted(set(loaded.state) - set(objects))}, "
            f"only here: {sorted(set(objects) - set(loaded.state))}",
        )
    plain: dict[str, Any] = {}
    for name, target in objects.items():
        saved = loaded.state[name]
        if isinstance(target, torch.Generator):
            target.set_state(saved)
        elif hasattr(target, "load_state_dict"):
            try:
                target.load_state_dict(saved)
            except (RuntimeError, ValueError, KeyError) as error:
                raise SnapshotError(f"{name} does not take its saved state", why=str(error)) from error
        elif isinstance(target, torch.Tensor):
            if not isinstance(saved, torch.Tensor) or (saved.shape, saved.dtype) != (target.shape, target.dtype):
                raise SnapshotError(f"{name} has another shape or dtype than its saved state")
            with torch.no_grad():
                target.copy_(saved)
        else:
            plain[name] = saved
    _set_generators(loaded.rng, torch)
    return plain


class _DamagedError(Exception):
    """A point is not what its manifest says."""


class _HashedFile:
    """What torch.save writes to. Takes every byte, and keeps the first error for `check`: torch's archive writer
    does not survive an exception in the middle of a record."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._error: OSError | None = None
        self.hash = xxhash.xxh3_128()
        self.size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.hash.update(view)
        self.size += len(view)
        done = 0
        try:
            while self._error is None and done < len(view):
                done += self._raw.write(view[done:])
        except OSError as error:
            self._error = error
        return len(view)

    def flush(self) -> None:
        pass

    def check(self) -> None:
        if self._error is not None:
            raise self._error


def _digest(path: Path) -> tuple[int, str]:
    size, state = 0, xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            size += len(data)
            state.update(data)
    return size, state.hexdigest()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _copied(value: Any, where: str, torch: Any) -> Any:
    """A copy of plain data and tensors that shares nothing with the original; dict order is kept."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Mapping):
        return {_key(key, where): _copied(item, f"{where}[{key!r}]", torch) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item, f"{where}[{number}]", torch) for number, item in enumerate(value))
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    raise SnapshotError(
        f"{where} cannot be kept in a snapshot",
        why=f"it is a {type(value).__name__}",
        do="Give tensors, plain data, or objects with state_dict().",
    )


def _key(key: Any, where: str) -> Any:
    if type(key) not in (bool, int, float, str):
        raise SnapshotError(f"{where} has a key that cannot be kept", why=f"{key!r} is a {type(key).__name__}")
    return key


def _generators(torch: Any) -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    rng: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    if torch.cuda.is_initialized():
        rng["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":
            key = state["state"]["key"]
            rng["numpy"] = [[int(word) for word in key], state["state"]["pos"], state["has_gauss"], state["gauss"]]
    return rng


def _set_generators(rng: Mapping[str, Any], torch: Any) -> None:
    torch.set_rng_state(rng["torch"])
    version, numbers, gauss = rng["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in rng and torch.cuda.is_available() and torch.cuda.device_count() == len(rng["cuda"]):
        torch.cuda.set_rng_state_all(rng["cuda"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in rng:
        key, position, has_gauss, gauss = rng["numpy"]
        numpy.random.set_state(("MT19937", key, position, has_gauss, gauss))
