"""Another user connects to a port of the frozen processes, which accept nothing any more.

CRIU refuses to dump a port with such a connection, so every user could prevent every image.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import FreezeError
from safepoint.transparent.criu import tree_dump
from safepoint.transparent.criu.obstacles import refuse_connecting
from safepoint.transparent.criu.program import Criu

_CONNECT = """
import socket, sys
one = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print("connected", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(params=["127.0.0.1", "::"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port of this process, at which it accepts nothing."""
    family = socket.AF_INET6 if request.param == "::" else socket.AF_INET
    try:
        server = socket.create_server((request.param, 0), family=family, dualstack_ipv6=family is socket.AF_INET6)
    except (OSError, ValueError):
        pytest.skip("this machine has no IPv6")
    with server:
        yield server.getsockname()[1]


def connect(port: int) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _CONNECT, "127.0.0.1", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "connected\n"
    return process


def test_a_connection_of_another_program(port: int) -> None:
    """It is left out. One between the frozen processes would be lost, so there is no image."""
    with connect(port) as process:
        try:
            refuse_connecting([os.getpid()])
            with pytest.raises(FreezeError, match="has not accepted the connection yet"):
                refuse_connecting([os.getpid(), process.pid])
        finally:
            process.kill()
    refuse_connecting([os.getpid(), process.pid])


def test_criu_leaves_out_such_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(Criu, "run", lambda self, action, arguments, **_: found.extend(arguments))
    tree_dump.dump(Criu(path="criu", version="4.2"), os.getpid(), tmp_path, log=tmp_path / "log")
    assert "--skip-in-flight" in found
