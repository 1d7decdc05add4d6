"""gloo and NCCL check no peer. If all nodes are on one machine, no other machine may reach their ports."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from safepoint.settings.run_settings import RunSettings
from safepoint.training.launcher.agent import _config
from safepoint.training.launcher.launch_plan import LaunchPlan
from safepoint.training.launcher.rendezvous import Rendezvous
from safepoint.training.rendezvous.admission import NoAnswerError, SameUser
from tests.support.ports import free_port

_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_PROGRAM = """
import os, sys
name = sys.argv[1] + os.environ["GROUP_RANK"]
open(name, "w").write(os.environ.get("GLOO_SOCKET_IFNAME", ""))
"""
needs_loopback = pytest.mark.skipif(not Path("/sys/class/net/lo").exists(), reason="the interface has another name")


@needs_loopback
@pytest.mark.ranks
@pytest.mark.usefixtures("start_of_ranks")
def test_two_nodes_on_one_machine(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_PROGRAM)
    port = free_port()
    environ = {name: text for name, text in os.environ.items() if name not in _VARIABLES}
    code = "from safepoint.cli.main import main; main()"
    options = ("--nnodes", "2", "--master-addr", "localhost", "--master-port", str(port))
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-P", "-c", code, "run", *options, "--node-rank", str(node)),
                *("--output-dir", str(tmp_path / "o"), str(script), f"{tmp_path}/seen-"),
            ],
            env=environ,
        )
        for node in range(2)
    ]
    assert [node.wait(120) for node in nodes] == [0, 0]
    assert [(tmp_path / f"seen-{node}").read_text() for node in range(2)] == ["lo", "lo"]


@needs_loopback
@pytest.mark.parametrize(
    ("num_nodes", "address", "interface"),
    [(1, None, "lo"), (1, "10.0.0.1", "lo"), (2, "127.0.0.1", "lo"), (2, "::1", "lo"), (2, "10.0.0.1", None)],
)
def test_the_interface(num_nodes: int, address: str | None, interface: str | None, tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    script.touch()
    plan = LaunchPlan(program=(str(script),), nnodes=num_nodes, master_addr=address)
    settings = RunSettings(record_folder=str(tmp_path))
    with mock.patch.dict(os.environ):
        for name in _VARIABLES:
            os.environ.pop(name, None)
        _config(plan, settings, is_on_one_machine=Rendezvous(plan, settings).is_on_one_machine)
        assert [os.environ.get(name) for name in _VARIABLES] == [interface] * 3


def test_the_address_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that changes its answer must not make one part of the launcher disagree with the other."""
    script = tmp_path / "a.py"
    script.touch()
    answers = iter(["127.0.0.1", "10.0.0.1"])
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", (next(answers), 0))])
    plan = LaunchPlan(program=(str(script),), nnodes=2, master_addr="node0")
    rendezvous = Rendezvous(plan, RunSettings())
    assert rendezvous.is_on_one_machine
    assert rendezvous._connect() > 0
    rendezvous.shutdown()


def test_a_socket_that_is_connected_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """If node 0 does not listen yet, and its port is the only free one, the kernel connects a socket with itself."""
    port = free_port()
    connect = asyncio.open_connection

    async def from_the_port(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await connect(host, port, local_addr=(host, port))

    monkeypatch.setattr(asyncio, "open_connection", from_the_port)
    with pytest.raises(NoAnswerError):
        asyncio.run(SameUser().connect("127.0.0.1", port, 1.0))
