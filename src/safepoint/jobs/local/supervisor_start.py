"""Starts the supervisors of new jobs, and of jobs whose supervisor was killed.

A supervisor is the process that starts the launchers of one job, and watches them.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Generator

from safepoint.errors import ExitCode, SafepointError
from safepoint.foundation import clock
from safepoint.foundation.files import is_locked
from safepoint.foundation.processes import JOB_VARIABLE
from safepoint.jobs.local.history import History
from safepoint.jobs.local.paths import job_folder, make_private, supervisor_lock
from safepoint.jobs.local.slots import VISIBLE

_WITHIN_S = 15.0
_log = logging.getLogger("safepoint")


def start_supervisor(name: str, *, is_new: bool = False) -> None:
    """Start the supervisor of a job, and wait until it holds the job's lock.

    Args:
        name: the job.
        is_new: whether the caller is submitting the job, and deletes it if an error is raised.

    Raises:
        SafepointError: the supervisor ended at once, or did not acquire the lock in time.
        OSError: the process cannot be started.
    """
    _wait_for(name, _spawn(name), clock.monotonic_s() + _WITHIN_S, is_new=is_new)


def start_missing_supervisors(
    history: History, *, but: str | None = None, patience_s: float = _WITHIN_S
) -> list[str]:
    """Start a supervisor for every job that needs a supervisor and has none. A failure is logged as a warning.

    Args:
        history: the history.
        but: the job that this process supervises, or None. This job is left out, because a process that checks a lock
            of its own may release the lock.
        patience_s: how long to wait, in total, until the new supervisors hold their locks.

    Returns:
        The jobs that had no supervisor.
    """
    left = [
        job.name
        for job in history.unfinished()
        if job.needs_supervisor and job.name != but and not is_locked(supervisor_lock(job.name))
    ]
    started: dict[str, subprocess.Popen[bytes]] = {}
    for name in left:
        with _as_warning():
            started[name] = _spawn(name)
    deadline_s = clock.monotonic_s() + patience_s
    for name, process in started.items() if patience_s else ():
        with _as_warning():
            _wait_for(name, process, deadline_s)
    return left


def _spawn(name: str) -> "subprocess.Popen[bytes]":
    folder = make_private(job_folder(name))
    inherited = {JOB_VARIABLE, VISIBLE} if JOB_VARIABLE in os.environ else set[str]()
    with (folder / "supervisor.log").open("ab") as stream:
        process = subprocess.Popen(
            # With `-P`, the supervisor imports no modules from the job's folder.
            [sys.executable, "-P", "-m", "safepoint.jobs.local.supervisor", name],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            cwd=folder,
            # A job may submit another job. The new supervisor must not inherit two variables of the first job: its
            # devices, and its folder, by which the processes of a job are found and killed.
            env={name: text for name, text in os.environ.items() if name not in inherited},
            start_new_session=True,
        )
    # The thread waits for the process, so that it does not become a zombie.
    threading.Thread(target=process.wait, name=f"safepoint-{name}", daemon=True).start()
    return process


def _wait_for(name: str, process: "subprocess.Popen[bytes]", deadline_s: float, *, is_new: bool = False) -> None:
    log = job_folder(name) / "supervisor.log"
    while not is_locked(supervisor_lock(name)):
        if process.returncode is not None:
            if process.returncode in {ExitCode.OK, ExitCode.NOT_FOUND}:
                # No supervisor is needed: the job has ended or was deleted, or another supervisor started first.
                return
            raise SafepointError(f"the supervisor of job {name} did not start", hint=f"see {log}")
        if clock.monotonic_s() >= deadline_s:
            late = f"did not start within {_WITHIN_S:g} s, perhaps because this machine is busy"
            why = f"the supervisor of job {name} {late}"
            if is_new:
                raise SafepointError(f"{why}; the job was not submitted", hint="submit it again later")
            raise SafepointError(
                f"{why}; it is still starting, and the job may start later",
                hint=f"wait a minute, and look with `safepoint status {name}`; if the job has not started, see {log}",
            )
        clock.sleep(0.02)


@contextlib.contextmanager
def _as_warning() -> Generator[None]:
    try:
        yield
    except (SafepointError, OSError) as error:
        _log.warning("%s", error)
