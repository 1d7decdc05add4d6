"""The states of a job, the same on this machine and on a cluster."""

import enum


class JobState(enum.StrEnum):
    """The state of a job. On this machine the job's supervisor changes it, and the command `resume` sets QUEUED."""

    CREATED = "Created"
    """Stored; its supervisor is about to start."""
    QUEUED = "Queued"
    """Waits for free slots, or for quota."""
    INADMISSIBLE = "Inadmissible"
    """Waits for something that will not come unless a person acts; the job's message says for what."""
    STARTING = "Starting"
    """Admitted; its pods or processes do not train yet."""
    RUNNING = "Running"
    SUSPENDING = "Suspending"
    """Received a request to stop, and saves."""
    SUSPENDED = "Suspended"
    """Stopped by `suspend`; `resume` continues it."""
    RESUMING = "Resuming"
    """Its processes have started again and load a checkpoint, or they are restored from a process image."""
    PREEMPTED = "Preempted"
    """Stopped in favour of a job with a higher priority; the job resumes by itself."""
    RESTARTING = "Restarting"
    """Its processes were interrupted or killed from outside; the job starts again by itself."""
    COMPLETE = "Complete"
    FAILED = "Failed"
    DELETING = "Deleting"
    """Is being deleted."""

    @property
    def is_active(self) -> bool:
        """Whether the job runs, or will run without another command."""
        return self not in {JobState.SUSPENDED, JobState.COMPLETE, JobState.FAILED, JobState.DELETING}

    @property
    def is_waiting(self) -> bool:
        """Whether the job waits for CPU cores or GPUs, for quota, or for a person to fix something."""
        return self in {JobState.CREATED, JobState.QUEUED, JobState.INADMISSIBLE, JobState.PREEMPTED}

    @property
    def holds_slots(self) -> bool:
        """Whether the job has processes, or is about to start some."""
        return self in _WITH_PROCESSES

    @property
    def is_over(self) -> bool:
        """Whether the job is complete or failed."""
        return self in {JobState.COMPLETE, JobState.FAILED}


_WITH_PROCESSES = {
    *(JobState.STARTING, JobState.RUNNING, JobState.RESUMING, JobState.SUSPENDING, JobState.RESTARTING),
}
