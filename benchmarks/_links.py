"""Members as on machines of their own: network namespaces joined by a bridge, each over a link of limited rate."""

from __future__ import annotations

import os
import shutil
import subprocess


def _do(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def why_not() -> str:
    """Why this machine cannot have such links; empty if it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2) not installed"
    if os.geteuid():
        return "network namespaces need root"
    try:
        Links(1, mbit=100).close()
    except OSError as error:
        return str(error)
    return ""


class Links:
    """`count` namespaces, each with `mbit` Mbit/s in each direction, and a hub without a limit.

    `places` are (namespace, address): the hub's first.
    """

    def __init__(self, count: int, *, mbit: int) -> None:
        mark = f"rr{os.getpid() % 100000}"
        self._names: list[str] = []
        try:
            hub = self._namespace(f"{mark}-hub")
            _do("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
            _do("ip", "-n", hub, "addr", "add", "10.99.0.254/24", "dev", "bridge")
            _do("ip", "-n", hub, "link", "set", "bridge", "up")
            self.places = [(hub, "10.99.0.254")]
            for number in range(1, count + 1):
                name = self._namespace(f"{mark}-{number}")
                port, address = f"port{number}", f"10.99.0.{number}"
                _do("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
                _do("ip", "-n", hub, "link", "set", port, "master", "bridge")
                _do("ip", "-n", hub, "link", "set", port, "up")
                _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                _do("ip", "-n", name, "link", "set", "eth0", "up")
                for where, device in ((name, "eth0"), (hub, port)):  # what it sends, and what it is sent
                    limit = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "100ms")
                    _do("tc", "-n", where, "qdisc", "add", "dev", device, "root", *limit)
                self.places.append((name, address))
        except BaseException:
            self.close()
            raise

    def _namespace(self, name: str) -> str:
        _do("ip", "netns", "add", name)
        self._names.append(name)
        _do("ip", "-n", name, "link", "set", "lo", "up")
        return name

    def close(self) -> None:
        for name in self._names:
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True, timeout=20)
        self._names.clear()
