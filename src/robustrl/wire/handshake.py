"""Both sides prove that they know the job's secret before anything else is read or sent.

    server -> client   {proto, nonce}
    client -> server   {proto, nonce, identity, mac}     mac = HMAC(secret, "client", nonces, identity)
    server -> client   {mac} or {refused, why}           mac = HMAC(secret, "server", nonces, identity)

The secret itself never travels, and a recorded handshake is worthless for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from robustrl.errors import ConfigError, FencedError, HandshakeRefusedError, ProtocolError, RobustError
from robustrl.roles import Identity
from robustrl.wire import frames

PROTOCOL_VERSION: Final = 1
HELLO_LIMIT: Final = 4096
"""Bytes in a frame of the handshake at the most: a stranger gets no more memory than this."""
HELLO_SECONDS: Final = 5.0

Admit = Callable[[Identity], RobustError | None]
"""Says why an identity that knows the secret is not welcome all the same, or None."""


class Secret:
    """The job's shared secret. Never printed."""

    def __init__(self, key: bytes) -> None:
        if len(key) < 16:
            raise ConfigError("the job's secret is too short", why=f"{len(key)} bytes; at least 16 are needed")
        self._key = key

    def __repr__(self) -> str:
        return "Secret(...)"

    @classmethod
    def create(cls, path: Path) -> Secret:
        """Makes a new secret and keeps it in a file that only the owner can read."""
        secret = cls(secrets.token_bytes(32))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secret._key.hex())
        return secret

    @classmethod
    def read(cls, path: Path) -> Secret:
        try:
            return cls(bytes.fromhex(path.read_text().strip()))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the job's secret from {path}", why=str(error)) from error

    def mac(self, side: str, nonces: bytes, identity: str) -> bytes:
        text = f"robustrl/{PROTOCOL_VERSION}/{side}/{identity}/".encode()
        return hmac.new(self._key, text + nonces, hashlib.sha256).digest()


def _check_version(message: dict[str, Any]) -> None:
    theirs = message.get("proto")
    if theirs != PROTOCOL_VERSION:
        raise HandshakeRefusedError(
            "the peer speaks another protocol version",
            why=f"it says {theirs!r}, we are {PROTOCOL_VERSION}",
            do="Install the same robustrl on all machines of the job.",
        )


def _field(message: dict[str, Any], name: str, kind: type[Any], length: int | None = None) -> Any:
    value: Any = message.get(name)
    if not isinstance(value, kind) or (length is not None and len(value) != length):
        raise ProtocolError(f"the handshake's field {name!r} is missing or wrong")
    return value


async def accept(reader: frames.Reader, writer: frames.Writer, secret: Secret, admit: Admit | None = None) -> Identity:
    """The server's side. Returns who the client is, or refuses it (saying why, where it proved the secret)."""
    async with asyncio.timeout(HELLO_SECONDS):
        ours = secrets.token_bytes(16)
        writer.write(frames.encode({"proto": PROTOCOL_VERSION, "nonce": ours}))
        hello = await frames.read_frame(reader, HELLO_LIMIT)
        refusal: RobustError | None = None
        identity = None
        nonces = b""
        try:
            _check_version(hello)
            theirs = _field(hello, "nonce", bytes, 16)
            name = _field(hello, "identity", str)
            nonces = ours + theirs
            if not hmac.compare_digest(_field(hello, "mac", bytes), secret.mac("client", nonces, name)):
                raise HandshakeRefusedError(
                    "the peer does not know this job's secret",
                    do="Is it a member of another job? Each job's secret lies in its run folder.",
                )
            identity = Identity.parse(name)
            refusal = admit(identity) if admit else None
        except RobustError as error:
            refusal = error
        if refusal is not None or identity is None:
            assert refusal is not None
            writer.write(
                frames.encode(
                    {"refused": refusal.what, "why": refusal.why or "", "fenced": isinstance(refusal, FencedError)}
                )
            )
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            raise refusal
        writer.write(frames.encode({"mac": secret.mac("server", nonces, str(identity))}))
        await writer.drain()
        return identity


async def offer(reader: frames.Reader, writer: frames.Writer, secret: Secret, identity: Identity) -> None:
    """The client's side."""
    async with asyncio.timeout(HELLO_SECONDS):
        hello = await frames.read_frame(reader, HELLO_LIMIT)
        _check_version(hello)
        ours = secrets.token_bytes(16)
        nonces = _field(hello, "nonce", bytes, 16) + ours
        name = str(identity)
        writer.write(
            frames.encode(
                {
                    "proto": PROTOCOL_VERSION,
                    "nonce": ours,
                    "identity": name,
                    "mac": secret.mac("client", nonces, name),
                }
            )
        )
        answer = await frames.read_frame(reader, HELLO_LIMIT)
        if "refused" in answer:
            kind = FencedError if answer.get("fenced") else HandshakeRefusedError
            raise kind(f"the peer refused us: {answer['refused']}", who=name, why=str(answer.get("why") or "") or None)
        if not hmac.compare_digest(_field(answer, "mac", bytes), secret.mac("server", nonces, name)):
            raise HandshakeRefusedError("the server does not know this job's secret", who=name)
