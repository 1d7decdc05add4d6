"""Another user of the machine binds all ports from which the kernel chooses, so no run can start now.

The exit code must say that the same command can be run again: a supervisor or a scheduler would give up a job for an
invalid option.
"""

import errno
import os
import socket
from pathlib import Path

import pytest

from safepoint.errors import ExitCode, UsageError
from safepoint.settings.run_settings import RunSettings
from safepoint.training.launcher.launch_plan import LaunchPlan
from safepoint.training.launcher.rendezvous import NoPortError, Rendezvous
from safepoint.training.rendezvous import store_server


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").touch()
    return str(tmp_path / "train.py")


def test_no_port_is_free(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(host: str, port: int) -> socket.socket:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    monkeypatch.setattr(store_server, "_bind", refuse)
    rendezvous = Rendezvous(LaunchPlan(program=(script,)), RunSettings())
    try:
        with pytest.raises(NoPortError, match=r"no port on 127\.0\.0\.1 is free") as caught:
            rendezvous.next_rendezvous()
    finally:
        rendezvous.shutdown()
    assert caught.value.exit_code == ExitCode.TERMINATED_UNSAVED
    assert "--master-port" not in str(caught.value)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_port_that_the_user_has_named(num_nodes: int, script: str, tmp_path: Path) -> None:
    """Another port has to be named, on every node."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        address = "127.0.0.1" if num_nodes == 1 else socket.gethostname()
        plan = LaunchPlan(program=(script,), nnodes=num_nodes, master_addr=address, master_port=port)
        rendezvous = Rendezvous(plan, RunSettings(output_dir=str(tmp_path / "out")))
        rendezvous.is_on_one_machine = num_nodes == 1
        try:
            with pytest.raises(UsageError, match=f"port {port} cannot be used"):
                rendezvous.next_rendezvous()
        finally:
            rendezvous.shutdown()
