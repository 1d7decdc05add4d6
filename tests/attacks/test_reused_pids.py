"""The number of a process that has ended belongs to an innocent process: that one gets no signal."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import ExitCode
from safepoint.foundation.processes import ProcessId, boot_id, identify
from safepoint.jobs.local.attempt.launchers import Launchers
from safepoint.jobs.local.history import History
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.local.supervisor import supervise
from safepoint.jobs.model.records import NodeRecord, RequestedAction
from safepoint.jobs.model.states import JobState
from safepoint.settings.run_settings import RunSettings
from safepoint.training.launcher import signal_relay
from safepoint.training.launcher.launcher_reporter import LauncherReporter
from safepoint.training.launcher.signal_relay import SignalRelay
from tests.support.job_values import job_spec

Signals = list[tuple[int, int]]


@pytest.fixture
def innocent() -> Iterator[ProcessId]:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        known = identify(process.pid)
        assert known is not None
        yield known
        process.kill()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Signals:
    """The signals that would have been sent; -1 is all processes of this user, and 0 this process group."""
    found: Signals = []
    monkeypatch.setattr(os, "kill", lambda pid, number: found.append((pid, number)))
    monkeypatch.setattr(os, "killpg", lambda pid, number: found.append((-pid, number)))
    return found


WRONG: dict[str, Callable[[ProcessId], ProcessId]] = {
    "another start": lambda one: replace(one, start_ticks=one.start_ticks - 1),
    "another boot": lambda one: replace(one, boot="another"),
    "no boot": lambda one: replace(one, boot=""),
    "init": lambda _: ProcessId(pid=1, start_ticks=12345678901, boot=boot_id()),
    "all processes": lambda _: ProcessId(pid=-1, start_ticks=0, boot=boot_id()),
    "this group": lambda _: ProcessId(pid=0, start_ticks=0, boot=boot_id()),
    "a number too large": lambda _: ProcessId(pid=1 << 62, start_ticks=0, boot=boot_id()),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_launchers_in_the_history(wrong: str, innocent: ProcessId, sent: Signals, tmp_path: Path) -> None:
    """Stopped, killed and waited for: none of the records leads to another process."""
    record = NodeRecord(node=0, process=WRONG[wrong](innocent), gpus=())
    launchers = Launchers(job_spec(), tmp_path / "job", 1, [record])
    assert not launchers.are_alive
    launchers.ask_to_stop()
    launchers.enforce()
    launchers.kill()
    launchers.wait_until_gone()
    assert launchers.exit_codes == [None]
    assert sent == []
    assert innocent.is_alive


@pytest.mark.parametrize("wanted", [RequestedAction.SUSPEND, RequestedAction.DELETE])
def test_commands_for_a_job_whose_launcher_is_gone(
    wanted: RequestedAction, innocent: ProcessId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine was restarted, and the launcher's number is in use again: a real supervisor concludes the job."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process is no supervisor afterwards
    with History() as history:
        history.add(job_spec("a"), actor="me")
        job_folder("a").mkdir(parents=True)
        history.become("a", JobState.RUNNING, actor="me", attempt=1)
        history.begin_attempt("a", 1, 1)
        process = replace(innocent, start_ticks=innocent.start_ticks - 1)
        history.add_node("a", 1, NodeRecord(node=0, process=process, gpus=()))
        history.request("a", wanted, actor="me")
        assert supervise("a") == (0 if wanted is RequestedAction.SUSPEND else ExitCode.NOT_FOUND)
        job = history.find("a")
    assert job is None or job.state is JobState.SUSPENDED
    assert (job is None) == (wanted is RequestedAction.DELETE)
    assert innocent.is_alive


def relay_of(folder: Path) -> SignalRelay:
    settings = RunSettings()
    return SignalRelay(settings, folder, is_alone=True, reporter=LauncherReporter.__new__(LauncherReporter))


def test_ranks_that_have_ended_while_others_run(
    innocent: ProcessId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has ended is reaped, and its number may be used again while the other ranks train for days."""
    gone = replace(innocent, start_ticks=innocent.start_ticks - 1)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as rank:
        known = {rank.pid: identify(rank.pid), innocent.pid: gone}
        monkeypatch.setattr(signal_relay, "identify", known.get)
        relay = relay_of(tmp_path)
        relay.set_ranks([innocent.pid, rank.pid])
        relay.request(signal.SIGTERM)
        assert rank.wait(30) == -signal.SIGTERM
        relay.kill_ranks()
    assert innocent.is_alive


def test_a_group_whose_leader_has_ended_is_ended(tmp_path: Path) -> None:
    """A rank that was killed leaves its data loaders."""
    command = ["sh", "-c", "sleep 600 & echo $!; exec sleep 600"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        loader = identify(int(rank.stdout.readline()))
        relay = relay_of(tmp_path)
        relay.set_ranks([rank.pid])
        rank.kill()
    assert loader is not None
    assert loader.is_alive
    relay.kill_ranks()
    for _ in range(1000):
        if not loader.is_alive:
            break
        signal.sigtimedwait([], 0.01)
    assert not loader.is_alive


def test_the_pid_in_a_folders_lock_is_for_messages_only(innocent: ProcessId, sent: Signals, tmp_path: Path) -> None:
    """The lock counts, and not who it says holds it."""
    output = OutputFolder(tmp_path / "out")
    output.prepare()
    for name in ("lock", "keeper"):
        (output.control / name).write_text(f'{{"pid": {innocent.pid}, "host": "here", "since": "now"}}')
    assert output.claim(wait_s=0, waiting=lambda who: None)
    output.clean()
    output.release()
    assert sent == []
