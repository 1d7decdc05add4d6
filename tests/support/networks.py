"""Networks of their own on this machine: two that a cable joins, or one with nothing but loopback.

They are namespaces of the kernel; needs root and `ip`.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

Made = TypeVar("Made")


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


@contextlib.contextmanager
def loopback_alone() -> Generator[Network]:
    """A network that reaches nothing but its own loopback."""
    network = Network(name=f"sp-{uuid.uuid4().hex[:8]}", address="127.0.0.1", interface="lo")
    _ip("netns", "add", network.name)
    try:
        _ip("-n", network.name, "link", "set", "lo", "up")
        yield network
    finally:
        subprocess.run(["ip", "netns", "del", network.name], check=False, capture_output=True)


def make_there(network: Network, make: Callable[[], Made]) -> Made:
    """What `make` returns when it is called in a network: a socket stays in the network in which it was made."""

    def enter_and_make() -> Made:
        with open(f"/run/netns/{network.name}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:  # os.setns is new in Python 3.12
                raise OSError(ctypes.get_errno(), f"the network {network.name} cannot be entered")
        return make()

    with ThreadPoolExecutor(1) as thread:  # only this thread enters the network, and it ends
        return thread.submit(enter_and_make).result()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
