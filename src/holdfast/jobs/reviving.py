"""Starts supervisors: for a new job, and for every job whose supervisor was killed."""

import os
import subprocess
import sys
import threading

from holdfast.errors import HoldfastError
from holdfast.foundation import clock
from holdfast.foundation.files import is_locked
from holdfast.jobs.history import History
from holdfast.jobs.places import job_folder, make_private, supervisor_lock

_WITHIN_S = 15.0


def start_supervisor(name: str) -> None:
    """Start the supervisor of a job, and wait until it looks after it.

    Raises:
        HoldfastError: it ended at once.
    """
    folder = make_private(job_folder(name))
    log = folder / "supervisor.log"
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.jobs.supervisor", name],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            cwd=folder,
            start_new_session=True,
        )
    # Whoever starts it may live long: a thread asks how it ended, so that no zombie stays.
    threading.Thread(target=process.wait, name=f"holdfast-{name}", daemon=True).start()
    deadline_s = clock.monotonic_s() + _WITHIN_S
    while not is_locked(supervisor_lock(name)):
        if process.returncode is not None:
            if process.returncode == 0:
                return  # it is done already, or another one was first
            raise HoldfastError(f"the supervisor of job {name} did not start", hint=f"see {log}")
        if clock.monotonic_s() >= deadline_s:
            raise HoldfastError(f"the supervisor of job {name} does not answer", hint=f"see {log}")
        clock.sleep(0.02)


def revive(history: History, *, but: str | None = None) -> list[str]:
    """Give every job that needs one a supervisor.

    Args:
        history: the history.
        but: a job whose supervisor is this process; looking at one's own lock would give it up.

    Returns:
        The jobs that had none.
    """
    left = [
        job.name
        for job in history.jobs()
        if job.needs_supervisor and job.name != but and not is_locked(supervisor_lock(job.name))
    ]
    for name in left:
        start_supervisor(name)
    return left


def supervisor_pid(name: str) -> int | None:
    """The pid of a job's supervisor, while it lives."""
    from holdfast.foundation.files import read_lock_owner

    lock = supervisor_lock(name)
    pid = read_lock_owner(lock).get("pid") if is_locked(lock) else None
    return pid if isinstance(pid, int) and pid != os.getpid() else None


__all__ = ["revive", "start_supervisor", "supervisor_pid"]
