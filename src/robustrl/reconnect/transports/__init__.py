"""Ways for bytes to get from a holder to a puller: one small interface (`base`), one module a way.

`make` builds what a member serves; `choose` says which of them a pair of peers uses, and why.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from robustrl.config import ReconnectConfig
from robustrl.errors import MissingDependencyError, TransportError
from robustrl.reconnect.transports.base import Transport
from robustrl.reconnect.transports.shm import ShmTransport, host_key
from robustrl.reconnect.transports.tcp import TcpTransport
from robustrl.roles import Identity
from robustrl.wire import Secret


class Choice(NamedTuple):
    """A transport to one peer. `why` is for people."""

    transport: str
    why: str


def ucx_installed() -> bool:
    return importlib.util.find_spec("ucxx") is not None


def nixl_installed() -> bool:
    return any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13", "nixl"))


def make(config: ReconnectConfig, identity: Identity, secret: Secret, host: str) -> dict[str, Transport]:
    """The transports that a member serves and pulls over, in the order of preference.

    Raises:
        MissingDependencyError: the configured transport is not installed.
    """
    wanted = ("shm", "ucx", "tcp") if config.transport == "auto" else (config.transport,)
    made: dict[str, Transport] = {}
    for name in wanted:
        match name:
            case "shm":
                made[name] = ShmTransport(identity, secret, timeout_s=config.timeout_s, keep=config.keep_versions + 1)
            case "tcp":
                made[name] = TcpTransport(identity, secret, host=host, timeout_s=config.timeout_s)
            case "ucx":
                if ucx_installed():
                    from robustrl.reconnect.transports.ucx import UcxTransport

                    made[name] = UcxTransport(
                        identity, secret, host=host, timeout_s=config.timeout_s, credits=config.credits
                    )
                elif config.transport == "ucx":
                    raise MissingDependencyError(
                        "the transport ucx needs ucxx", do="Install robustrl[ucx], or set reconnect.transport to tcp."
                    )
            case "nixl":
                if not nixl_installed():
                    raise MissingDependencyError(
                        "the transport nixl needs NIXL",
                        do="Install robustrl[nixl], or set reconnect.transport to auto.",
                    )
                from robustrl.reconnect.transports.nixl import NixlTransport

                made[name] = NixlTransport(
                    identity, secret, host=host, timeout_s=config.timeout_s, credits=config.credits
                )
    return made


def choose(ours: Sequence[str], theirs: Mapping[str, str], here: str | None = None) -> list[Choice]:
    """The transports that both sides have, the best first: shared memory on one host, else UCX, else TCP.

    Args:
        ours: names of our transports, the preferred first.
        theirs: the peer's endpoints by transport.
        here: this host's key (default: `host_key()`), to know whether the peer is on it.

    Raises:
        TransportError: there is none.
    """
    here = host_key() if here is None else here
    same_host = theirs.get("shm", "").rpartition("/")[0] == here
    choices: list[Choice] = []
    notes: list[str] = []
    for name in ours:
        if name not in theirs:
            notes.append(f"the peer has no {name}")
        elif name == "shm" and not same_host:
            notes.append("the peer is on another host")
        elif len(ours) == 1:
            choices.append(Choice(name, "configured"))
        elif name == "shm":
            choices.append(Choice(name, "same host"))
        else:
            choices.append(Choice(name, "; ".join([*notes, f"both have {name}"])))
    if not choices:
        raise TransportError(
            "no transport leads to the peer",
            why=f"we have {', '.join(ours)}; {'; '.join(notes)}",
            do="Set the same reconnect.transport for all members.",
        )
    return choices
