"""What a freeze of a job of this machine stops and stores, and what prevents it. This module freezes nothing."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from safepoint.errors import SafepointError
from safepoint.foundation.processes import memory_of, processes_of
from safepoint.foundation.volumes.room import room_of
from safepoint.jobs.local.paths import images_of, job_folder
from safepoint.jobs.model.records import JobRecord
from safepoint.transparent.criu.program import find_criu
from safepoint.transparent.packages import require_packages


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezePlan:
    """What a freeze of a job needs.

    Args:
        folder: the folder of its process images, which is deleted with the job.
        num_processes: how many processes the job has.
        memory_bytes: the memory of these processes. Pages that several processes share are counted for each process,
            so the image may be smaller.
        free_bytes: how much may still be written to the folder; None if this is not known.
        obstacle: why this machine cannot freeze the job, as a sentence; empty if no obstacle is known.
    """

    folder: Path
    num_processes: int = 0
    memory_bytes: int = 0
    free_bytes: int | None = None
    obstacle: str = ""


def plan_freeze(job: JobRecord) -> FreezePlan:
    """What a freeze of a job needs. Nothing is changed."""
    folder = images_of(job.name)
    try:
        find_criu()
        require_packages()
    except SafepointError as error:
        what, hint = error.message.partition(";")[0], f" ({error.hint})" if error.hint else ""
        return FreezePlan(folder=folder, obstacle=f"This machine cannot freeze the job: {what}{hint}.")
    own = job_folder(job.name)
    sizes = [memory_of(pid, own) or 0 for pid in processes_of(own)]
    free_bytes: int | None = None
    with contextlib.suppress(OSError):
        room = room_of(own)
        free_bytes = None if room is None else room.free_bytes
    return FreezePlan(folder=folder, num_processes=len(sizes), memory_bytes=sum(sizes), free_bytes=free_bytes)
