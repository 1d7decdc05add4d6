"""Two machines' networks on this one: namespaces joined by a cable; needs root and `ip`."""

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Generator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """One end of the cable.

    Args:
        name: of the namespace.
        address: of this end.
        interface: its name, for GLOO_SOCKET_IFNAME.
    """

    name: str
    address: str
    interface: str

    def command(self, *words: str) -> list[str]:
        """The command that runs `words` there."""
        return ["ip", "netns", "exec", self.name, *words]


def unavailable() -> str | None:
    """Why there are no networks here, or None."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and the command ip"
    name = f"sp-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return None if made.returncode == 0 else f"no network namespace can be made here: {made.stderr.strip()}"


@contextlib.contextmanager
def two_networks() -> Generator[tuple[Network, Network]]:
    """Two networks that reach each other, and nothing else."""
    unique = uuid.uuid4().hex[:6]
    ends = [
        Network(name=f"sp-{unique}-{number}", address=f"10.99.0.{number + 1}", interface=f"sp{unique}{number}")
        for number in range(2)
    ]
    try:
        for end in ends:
            _ip("netns", "add", end.name)
        _ip("link", "add", ends[0].interface, "type", "veth", "peer", "name", ends[1].interface)
        for end in ends:
            _ip("link", "set", end.interface, "netns", end.name)
            _ip("-n", end.name, "address", "add", f"{end.address}/24", "dev", end.interface)
            _ip("-n", end.name, "link", "set", end.interface, "up")
            _ip("-n", end.name, "link", "set", "lo", "up")
        yield ends[0], ends[1]
    finally:
        for end in ends:
            subprocess.run(["ip", "netns", "del", end.name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
