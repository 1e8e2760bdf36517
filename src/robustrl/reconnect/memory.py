"""The memory of weight versions: buffers that are written once, then only read, then used again.

A buffer is a memfd: it has no name, so nothing is left of it when its process is killed, and a peer on the same host
can map it. Fresh pages cost several times what copying into them costs, so buffers and mappings are kept for the next
version.

A buffer that others may map is used again only when nobody can read it any more. The kernel counts that: with the
memory's descriptor travels the write end of a pipe, and whoever passes the memory on passes the pipe on. The owner's
read end reports the end of the stream when the last copy is closed, which a SIGKILL does as well as a `close`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from robustrl.errors import TransportError, WeightError

if TYPE_CHECKING:
    import torch

    from robustrl.reconnect.cuda import Driver

    Memory = memoryview | torch.Tensor
    """Bytes one after another, which can be sliced: of the host, or of a device."""

_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1; not in Python's fcntl yet
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
IDLE_BUFFERS: Final = 2
"""Buffers without a version that a member keeps: one for the next version, one that its readers have not left yet."""


Spans = tuple[tuple[int, int], ...]


class StagingError(WeightError):
    """This member cannot take the memory that a version needs; no other source would change that."""


class Shared(NamedTuple):
    """Descriptors for a peer: the memory, read-only, and the pipe whose open copies count its readers."""

    memory: int
    readers: int

    def close(self) -> None:
        os.close(self.memory)
        os.close(self.readers)


class Buffer:
    """`size` bytes of our own shared memory, freed with the last reference. Raises StagingError when memory lacks.

    Args:
        size: in bytes.
        spans: the ranges of it, as (start, length), that will be used and take memory; None for all.
    """

    def __init__(self, size: int, spans: Spans | None = None) -> None:
        self.size = size
        self.spans = spans
        self.bytes = size if spans is None else sum(length for _, length in spans)
        self.fd = os.memfd_create("robustrl-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        try:
            # Taking the pages here turns a lack of memory into an error; touched later, it would be a SIGBUS.
            os.ftruncate(self.fd, max(size, 1))
            for start, length in ((0, max(size, 1)),) if spans is None else spans:
                os.posix_fallocate(self.fd, start, length)
            self.memory = mmap.mmap(self.fd, max(size, 1))
        except OSError as error:
            why = "out of memory" if error.errno in (errno.ENOSPC, errno.ENOMEM) else str(error)
            raise StagingError(f"cannot take {size} bytes for a weight version", why=why) from error
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        with contextlib.suppress(OSError):  # only this mapping can write from now on
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        self.view = memoryview(self.memory)[:size]
        self._pinned = False
        self._pipe: tuple[int, int] | None = None
        self._ends = weakref.finalize(self, _close_all, [])

    def pin(self, register: Callable[[int, int], Callable[[], None]]) -> None:
        """Page-locks the memory for as long as it lives, once. `register` takes its address and size."""
        import numpy as np

        if not self._pinned and self.size:
            undo = register(int(np.frombuffer(self.view, np.uint8).ctypes.data), self.size)
            weakref.finalize(self, undo).atexit = False  # at its end the process gives everything back anyway
            self._pinned = True

    def put(self, pairs: Sequence[tuple[memoryview, memoryview]]) -> None:
        """Copies (to, from) pairs of views."""
        for ours, theirs in pairs:
            ours[:] = theirs

    def share(self) -> Shared:
        """Descriptors for one more reader; the caller sends and closes them."""
        if self._pipe is None:
            self._pipe = os.pipe2(os.O_CLOEXEC)
            self._renew_finalizer()
        # A descriptor opened anew for reading only: a puller cannot change what others read.
        memory = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        return Shared(memory, os.dup(self._pipe[1]))

    def unread(self) -> bool:
        """Whether no other process can read this any more. To be asked only once nobody is given it any more."""
        if self._pipe is None:
            return True
        reading, writing = self._pipe
        if writing >= 0:
            os.close(writing)
            self._pipe = (reading, -1)
            self._renew_finalizer()
        poll = select.poll()
        poll.register(reading, 0)
        if not poll.poll(0):
            return False
        os.close(reading)
        self._pipe = None
        self._renew_finalizer()
        return True

    def _renew_finalizer(self) -> None:
        self._ends.detach()
        self._ends = weakref.finalize(self, _close_all, [fd for fd in self._pipe or () if fd >= 0])


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


class DeviceBuffer:
    """Memory of a GPU. Other processes reach it through UCX alone.

    Args:
        size: in bytes.
        driver: of the device.
    """

    def __init__(self, size: int, driver: Driver) -> None:
        self.size = self.bytes = size
        self.spans: Spans | None = None
        self.view = driver.allocate(size)
        self._driver = driver

    def unread(self) -> bool:
        """Always: nobody else can map it."""
        return True

    def put(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Copies (to, from) pairs of views, and returns when that is done."""
        self._driver.copy(pairs)


def in_host(view: Memory) -> memoryview:
    """The bytes of a view where the processor can read them: itself, or a copy."""
    return view if isinstance(view, memoryview) else memoryview(view.cpu().numpy().data)


class _Mapping:
    """Another process's buffer in our address space. Kept without a right to read it, for the next version in it."""

    def __init__(self, fd: int, length: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)
        self.memory = mmap.mmap(fd, length, access=mmap.ACCESS_READ)


class Mapped:
    """`size` bytes of another process's buffer, read-only, that stay what they are until `close`."""

    def __init__(self, mapping: _Mapping, size: int, readers: int) -> None:
        self.size = size
        self.memory = mapping.memory
        self.view = memoryview(mapping.memory)[:size]
        self._mapping = mapping
        self._end = weakref.finalize(self, os.close, readers)
        self._readers = readers

    def share(self) -> Shared:
        """See `Buffer.share`: the owner counts the reader that gets these as one of its own."""
        return Shared(os.dup(self._mapping.fd), os.dup(self._readers))

    def close(self) -> None:
        """Ends our reading: the owner may write into this memory again."""
        self._end()


class Mappings:
    """Mappings of peers' buffers, the `keep` used last."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._known: OrderedDict[tuple[int, int], _Mapping] = OrderedDict()

    def map(self, shared: Shared, size: int) -> Mapped:
        """Maps memory that a peer shared, and takes over both descriptors.

        Raises:
            TransportError: it is not memory that stays where it is: a peer could make us crash.
        """
        try:
            found = os.fstat(shared.memory)
            if found.st_size < size or not fcntl.fcntl(shared.memory, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise TransportError("the shared buffer is shorter than its manifest says, or could become so")
        except OSError as error:
            shared.close()
            raise TransportError("the source shared something that is no sealed memory", why=str(error)) from error
        except TransportError:
            shared.close()
            raise
        key = (found.st_dev, found.st_ino)
        mapping = self._known.get(key)
        if mapping is None:
            try:
                mapping = _Mapping(shared.memory, found.st_size)
            except OSError as error:
                os.close(shared.readers)
                raise StagingError(f"cannot map {size} bytes of a weight version", why=str(error)) from error
            self._known[key] = mapping
        else:
            os.close(shared.memory)
        self._known.move_to_end(key)
        while len(self._known) > self._keep:
            self._known.popitem(last=False)
        return Mapped(mapping, size, shared.readers)

    @property
    def bytes(self) -> int:
        return sum(len(mapping.memory) for mapping in self._known.values())

    def clear(self) -> None:
        self._known.clear()


class MemoryReport(msgspec.Struct, frozen=True):
    """What a member's weight versions occupy, in bytes."""

    held: int
    """Versions that are held and served."""
    own: int
    """Memory that this member took: versions held, one under way, and buffers kept for the next one."""
    idle: int
    """The part of `own` that holds no version now."""
    mapped: int
    """Memory of other members of this host that is mapped here, beside `own`."""
    peak: int
    """The most that `own` has been."""


class Pool:
    """The buffers of one member. From any thread.

    Args:
        budget: bytes that one version may take at the most; None for no limit.
        who: for errors.
        driver: of the device whose memory the buffers are; None for host memory.
    """

    def __init__(self, budget: int | None = None, who: object | None = None, driver: Driver | None = None) -> None:
        self._driver = driver
        self._budget = budget
        self._who = who
        self._lock = threading.RLock()  # a content may end while we are here, and give its buffer back
        self._idle: list[Buffer | DeviceBuffer] = []
        self._used: dict[int, int] = {}
        self._shards = 0
        self.peak = 0

    def take(self, size: int, spans: Spans | None = None) -> Buffer | DeviceBuffer:
        """A buffer of `size` bytes (of which only `spans` are used) whose content is arbitrary.

        Raises:
            StagingError: it does not fit the budget or the machine.
        """
        if self._driver is not None:
            spans = None  # its pages cannot be taken one by one
        need = size if spans is None else sum(length for _, length in spans)
        if self._budget is not None and need > self._budget:
            raise StagingError(
                f"a weight version of {need} bytes does not fit",
                who=self._who,
                why=f"reconnect.staging_bytes is {self._budget}",
                do="Raise it, or leave it out to allow one whole version.",
            )
        with self._lock:
            alike = [buffer for buffer in self._idle if (buffer.size, buffer.spans) == (size, spans)]
            fitting = next((buffer for buffer in alike if buffer.unread()), None)
            if fitting is not None:
                self._idle.remove(fitting)
            elif not self._shards:  # the model has changed: what is of another size will not be needed again
                self._idle = alike
        buffer = fitting or (Buffer(size, spans) if self._driver is None else DeviceBuffer(size, self._driver))
        with self._lock:
            self._used[id(buffer)] = buffer.bytes
            self.peak = max(self.peak, self._own())
        return buffer

    def expect(self, shards: int) -> None:
        """A version consists of this many buffers, which may be of different sizes."""
        self._shards = shards if shards > 1 else 0

    def give(self, buffer: Buffer | DeviceBuffer, *, again: bool = True) -> None:
        """Takes a buffer back that nothing in this process refers to any more.

        Args:
            again: whether it may be used again; False when something may still write into it.
        """
        with self._lock:
            self._used.pop(id(buffer), None)
            if again:
                self._idle = [*self._idle, buffer][-IDLE_BUFFERS * max(self._shards, 1) :]

    def clear(self) -> None:
        with self._lock:
            self._idle = []

    @property
    def own(self) -> int:
        with self._lock:
            return self._own()

    @property
    def idle(self) -> int:
        with self._lock:
            return sum(buffer.bytes for buffer in self._idle)

    def _own(self) -> int:
        return sum(self._used.values()) + sum(buffer.bytes for buffer in self._idle)
