"""The supervisor of a job."""

import os

from safepoint.foundation.files import is_locked, read_lock_owner
from safepoint.jobs.local.paths import supervisor_lock


def supervisor_pid(name: str) -> int | None:
    """The pid of a job's supervisor, while it runs."""
    lock = supervisor_lock(name)
    pid = read_lock_owner(lock).get("pid") if is_locked(lock) else None
    return pid if isinstance(pid, int) and pid != os.getpid() else None
