"""Supervisors are started where one is needed, and never two."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.errors import SafepointError
from safepoint.foundation.files import is_locked, read_lock_owner
from safepoint.foundation.processes import JOB_VARIABLE, identify, processes_of
from safepoint.jobs.local import supervisor_start
from safepoint.jobs.local.history import History
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.paths import job_folder, supervisor_lock
from safepoint.jobs.local.supervisor_start import start_missing_supervisors, start_supervisor
from safepoint.jobs.model.records import JobRecord, RequestedAction
from safepoint.jobs.model.states import JobState
from tests.support.job_values import job_record, job_spec
from tests.support.supervisors import supervisor_pid

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A state folder of its own, on a machine without slots: no job ever starts."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("SAFEPOINT_CPU_SLOTS", "4")
    yield
    for name in os.listdir(tmp_path / "safepoint" / "jobs") if (tmp_path / "safepoint" / "jobs").exists() else ():
        for pid in supervisors_of(name):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def history() -> Iterator[History]:
    with History() as history:
        yield history


def never(name: str) -> Any:
    """A job that waits for a device that is not there."""
    return job_spec(name, gpu_per_node=99)


def supervisors_of(name: str) -> list[int]:
    """Processes that look after this job, or try to."""
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and identify(int(entry)) is not None:
            try:
                arguments = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")[:-1]
                environ = Path("/proc", entry, "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ours = f"XDG_STATE_HOME={os.environ['XDG_STATE_HOME']}".encode() in environ
            if ours and arguments[-2:] == [b"safepoint.jobs.local.supervisor", name.encode()]:
                found.append(int(entry))
    return found


def wait_until(found: Callable[[], Any], timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (result := found()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


NEEDING = [(state, wanted) for state in JobState for wanted in RequestedAction]


@pytest.mark.parametrize(("state", "wanted"), NEEDING)
def test_who_needs_a_supervisor(state: JobState, wanted: RequestedAction) -> None:
    """Jobs that run, will run by themselves, or are to be removed; and the history looks among all of them."""
    job: JobRecord = job_record(state=state, wanted=wanted)
    over = state in {JobState.COMPLETE, JobState.FAILED, JobState.DELETING}  # the last one only on a cluster
    rests = state is JobState.SUSPENDED and wanted is not RequestedAction.RUN
    assert job.needs_supervisor is (wanted is RequestedAction.DELETE or not (over or rests))


def test_all_that_need_one_are_unfinished(history: History) -> None:
    """What the look at all jobs leaves out needs none."""
    for number, (state, wanted) in enumerate(NEEDING):
        history.add(job_spec(f"job-{number}"), actor="me")
        history.become(f"job-{number}", state, actor="me", wanted=wanted)
    needing = {job.name for job in history.jobs() if job.needs_supervisor}
    assert needing == {job.name for job in history.unfinished() if job.needs_supervisor}


def test_a_supervisor_is_started_and_says_who_it_is(history: History) -> None:
    """When the call returns it holds the lock; the job is what it says soon after."""
    history.add(never("a"), actor="me")
    assert start_missing_supervisors(history) == ["a"]
    pid = wait_until(lambda: supervisor_pid("a"))
    assert supervisors_of("a") == [pid]
    wait_until(lambda: history.job("a").state is JobState.QUEUED)
    assert "99 of 0 GPU slots" in history.job("a").message
    assert start_missing_supervisors(history) == []


def test_one_that_was_killed_is_replaced_by_any_command(history: History) -> None:
    """Opening the jobs is enough."""
    history.add(never("a"), actor="me")
    start_missing_supervisors(history)
    first = wait_until(lambda: supervisor_pid("a"))
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: supervisor_pid("a") is None)
    with LocalJobs() as jobs:
        wait_until(lambda: supervisor_pid("a") not in {None, first})
        assert jobs.job("a").state in {JobState.CREATED, JobState.QUEUED}


def test_a_finished_job_gets_none(history: History) -> None:
    """Nor does one that rests."""
    for name, state, wanted in (
        ("a", JobState.COMPLETE, RequestedAction.RUN),
        ("b", JobState.FAILED, RequestedAction.SUSPEND),
        ("c", JobState.SUSPENDED, RequestedAction.SUSPEND),
    ):
        history.add(never(name), actor="me")
        history.become(name, state, actor="me", wanted=wanted)
    assert start_missing_supervisors(history) == []


def _revive_at_once(gate: Any) -> None:
    with History() as history:
        gate.wait(60)
        start_missing_supervisors(history)


def test_ten_that_revive_at_once_leave_one_supervisor(history: History) -> None:
    """One holds the lock and is all that stays; the others go without having changed anything."""
    history.add(never("a"), actor="me")
    gate = SPAWN.Barrier(10)
    revivers = [SPAWN.Process(target=_revive_at_once, args=(gate,)) for _ in range(10)]
    for reviver in revivers:
        reviver.start()
    for reviver in revivers:
        reviver.join(90)
        assert reviver.exitcode == 0
    wait_until(lambda: history.job("a").state is JobState.QUEUED)
    wait_until(lambda: supervisors_of("a") == [supervisor_pid("a")])
    actors = {event.actor for event in history.events("a")} - {"me"}
    assert actors == {f"supervisor {supervisor_pid('a')}"}


def test_one_that_cannot_be_started_is_a_warning_and_holds_up_nobody(
    history: History, caplog: pytest.LogCaptureFixture
) -> None:
    """Another job's trouble: its folder is a file."""
    history.add(never("broken"), actor="me")
    history.add(never("good"), actor="me")
    job_folder("broken").parent.mkdir()
    job_folder("broken").write_text("in the way")
    assert start_missing_supervisors(history) == ["broken", "good"]
    assert is_locked(supervisor_lock("good"))
    assert "broken" in caplog.text
    with pytest.raises((SafepointError, OSError), match="broken"):
        start_supervisor("broken")


def test_one_that_ends_at_once_is_an_error_that_says_where_to_look(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log; here its interpreter ends with 3."""
    history.add(never("a"), actor="me")
    script = job_folder("python").parent / "python"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(SafepointError, match=r"supervisor of job a did not start.*supervisor\.log"):
        start_supervisor("a")


def test_one_that_is_late_may_still_start(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what becomes of the job: a resume may still succeed, and a submission is undone."""
    monkeypatch.setattr(supervisor_start, "_spawn", lambda name: SimpleNamespace(returncode=None))
    monkeypatch.setattr(supervisor_start, "_WITHIN_S", 0.1)
    with LocalJobs() as jobs, pytest.raises(SafepointError, match=r"within 0\.1 s.*; the job was not submitted"):
        jobs.submit(job_spec("b"))
    assert history.find("b") is None
    history.add(never("a"), actor="me")
    with pytest.raises(SafepointError, match=r"within 0\.1 s.*still starting, and the job may start later") as late:
        start_supervisor("a")
    assert "`safepoint status a`" in str(late.value)
    assert "supervisor.log" in str(late.value)


def test_a_job_of_a_job_is_not_a_process_of_it(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that submits another job and ends must not take that job's supervisor with it."""
    monkeypatch.setenv(JOB_VARIABLE, str(tmp_path / "outer"))
    history.add(never("inner"), actor="me")
    start_missing_supervisors(history)
    assert is_locked(supervisor_lock("inner"))
    assert processes_of(tmp_path / "outer") == []


def test_what_lies_in_the_jobs_folder_is_no_module_of_its_supervisor(history: History) -> None:
    """A job may bring a file of any name."""
    history.add(never("a"), actor="me")
    job_folder("a").mkdir(parents=True)
    (job_folder("a") / "json.py").write_text("raise SystemExit(9)\n")
    start_supervisor("a")
    assert is_locked(supervisor_lock("a"))


def test_a_supervisor_of_no_job_leaves_nothing(history: History) -> None:
    """The job was removed between the look at the history and the start: no folder stays, and no error is raised."""
    start_supervisor("gone")
    wait_until(lambda: not supervisors_of("gone"))
    assert not job_folder("gone").exists()


def test_a_supervisor_whose_job_is_removed_by_force_ends_and_never_adopts_a_namesake(history: History) -> None:
    """`train` is gone, and `train-2` is not its job although its name begins so."""
    history.add(never("train"), actor="me")
    history.add(never("train-2"), actor="me")
    start_supervisor("train")
    wait_until(lambda: history.job("train").state is JobState.QUEUED)
    history.forget("train")
    wait_until(lambda: not supervisors_of("train"))
    assert not job_folder("train").exists()
    assert history.job("train-2").state is JobState.CREATED
    assert [event.name for event in history.events("train-2")] == ["submitted"]


def test_what_is_wanted_while_a_supervisor_leaves_is_done(history: History) -> None:
    """Suspend, resume and suspend again without a pause: a process that finds the lock held relies on its holder."""
    history.add(never("a"), actor="me")
    with LocalJobs() as jobs:
        for _ in range(5):
            assert jobs.suspend("a", timeout_s=60).state is JobState.SUSPENDED
            jobs.resume("a")
            deadline = time.monotonic() + 60
            while history.job("a").state is JobState.SUSPENDED:
                assert time.monotonic() < deadline, "it has no supervisor"
                time.sleep(0.005)
        jobs.delete("a", timeout_s=60)
    assert not history.knows("a")


def test_a_supervisor_that_is_told_to_leave_leaves_and_the_job_stays_as_it_is(history: History) -> None:
    """The machine shuts down: the next command goes on."""
    history.add(never("a"), actor="me")
    start_supervisor("a")
    wait_until(lambda: history.job("a").state is JobState.QUEUED)
    pid = wait_until(lambda: supervisor_pid("a"))
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not supervisors_of("a"))
    assert not is_locked(supervisor_lock("a"))
    assert (history.job("a").state, history.job("a").wanted) == (JobState.QUEUED, RequestedAction.RUN)
    assert start_missing_supervisors(history) == ["a"]


def test_the_lock_says_who_holds_it(history: History) -> None:
    """In plain JSON, for people too."""
    history.add(never("a"), actor="me")
    start_supervisor("a")
    [pid] = supervisors_of("a")
    wait_until(lambda: read_lock_owner(supervisor_lock("a")) == {"pid": pid})
