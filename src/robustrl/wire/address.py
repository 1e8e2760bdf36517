"""Where a server listens."""

from __future__ import annotations

import socket
from typing import Self

import msgspec

from robustrl.errors import ConfigError

LOOPBACK = "127.0.0.1"


class Address(msgspec.Struct, frozen=True):
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Self:
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"{text!r} is not an address", why="an address is written HOST:PORT")
        return cls(host, int(port))


def bind(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. The kernel decides: there is no check before the bind."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(128)
        sock.setblocking(False)
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}",
            why=getattr(error, "strerror", None) or str(error),
            do="Give another port, or 0 for a free one.",
        ) from error
    return sock
