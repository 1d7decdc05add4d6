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
from safepoint.foundation import clock
from safepoint.jobs.local.attempt.launchers import Launchers
from safepoint.jobs.local.attempt.steps import JobStoppedError
from safepoint.settings.run_settings import RunSettings
from safepoint.training.launcher.launch_plan import LaunchPlan
from safepoint.training.launcher.rendezvous import NoPortError, Rendezvous
from safepoint.training.rendezvous import store_server
from tests.support.job_values import job_spec


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


def test_a_job_waits_for_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job must not fail for good, and can be stopped meanwhile."""
    create, left = socket.create_server, [errno.EADDRINUSE, errno.EADDRINUSE]

    def refuse(address: tuple[str, int]) -> socket.socket:
        if left:
            raise OSError(left.pop(), "no port")
        return create(address)

    monkeypatch.setattr(socket, "create_server", refuse)
    monkeypatch.setattr(clock, "sleep", lambda _: None)
    launchers = Launchers(job_spec(num_nodes=2), tmp_path, 1)
    launchers.reserve_port(lambda: True)
    assert not left
    launchers.kill()
    left += [errno.EADDRINUSE]
    with pytest.raises(JobStoppedError):
        launchers.reserve_port(lambda: False)
    left += [errno.EMFILE]
    with pytest.raises(OSError, match="no port"):
        launchers.reserve_port(lambda: True)


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
