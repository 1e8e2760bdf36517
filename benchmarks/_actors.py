"""Processes that do what they are told: each holds one object and answers calls of its methods.

Times are `time.monotonic()`, which all processes of one machine share.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import inspect
import multiprocessing
import os
import socket
import struct
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
PRIVATE = "private"
"""A namespace without a name: an actor there, and its children, see a loopback of their own and nothing else."""
_CLONE_NEWNET = 0x40000000
_CLONE_NEWUSER = 0x10000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


def preload(*modules: str) -> None:
    """Imports modules once, in the server that actors are forked from."""
    FORKS.set_forkserver_preload(list(modules))


def _system(name: str, *args: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args):
        raise OSError(ctypes.get_errno(), f"{name} failed: {os.strerror(ctypes.get_errno())}")


def _enter(namespace: str) -> None:
    """Moves this process into a network namespace; its threads and children, started later, come along."""
    if namespace == PRIVATE:
        _system("unshare", _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWNET | _CLONE_NEWUSER)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
        return
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _system("setns", fd, _CLONE_NEWNET)
    finally:
        os.close(fd)


async def _answer(kind: type[Any], args: tuple[Any, ...], pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    thing: Any = None
    while True:
        try:
            name, params = await loop.run_in_executor(None, pipe.recv)
        except EOFError:
            return
        try:
            if thing is None:
                thing = kind(*args)
            value = getattr(thing, name)(**params)
            pipe.send((True, await value if inspect.isawaitable(value) else value))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def _child(kind: type[Any], args: tuple[Any, ...], pipe: Connection, namespace: str) -> None:
    if namespace:
        _enter(namespace)
    asyncio.run(_answer(kind, args, pipe))
    os._exit(0)  # no goodbyes of libraries: the run is over for this process


class Actor:
    """One such process. Its object is made by ``kind(*args)`` at the first call, in the process."""

    def __init__(self, kind: type[Any], *args: Any, namespace: str = "") -> None:
        self._pipe, theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=_child, args=(kind, args, theirs, namespace), daemon=False)
        self._process.start()
        theirs.close()

    def begin(self, name: str, **params: Any) -> None:
        self._pipe.send((name, params))

    def end(self, timeout: float = 120.0) -> Any:
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"no answer within {timeout:g} s")
        good, value = self._pipe.recv()
        if not good:
            raise RuntimeError(f"an actor failed:\n{value}")
        return value

    def ask(self, name: str, **params: Any) -> Any:
        self.begin(name, **params)
        return self.end()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(2.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10.0)
        self._process.close()


def now() -> float:
    return time.monotonic()
