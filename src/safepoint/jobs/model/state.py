"""The states of a job, and the actions that can be requested of it. Pure: no clock, no processes, no files."""

import enum


class JobState(enum.StrEnum):
    """The state of a job. Only its supervisor changes it."""

    CREATED = "Created"
    """Stored; its supervisor is about to start."""
    QUEUED = "Queued"
    """Waits for free slots."""
    RUNNING = "Running"
    SUSPENDING = "Suspending"
    """Was asked to stop, and saves."""
    SUSPENDED = "Suspended"
    """Stopped by a person; `resume` continues it."""
    RESUMING = "Resuming"
    """Its processes have started again, and load the newest checkpoint."""
    PREEMPTED = "Preempted"
    """Stopped in favour of a job of higher priority; it continues by itself."""
    RESTARTING = "Restarting"
    """Its processes were interrupted or killed from outside; it starts again by itself."""
    COMPLETE = "Complete"
    FAILED = "Failed"

    @property
    def is_active(self) -> bool:
        """Whether it runs, or will by itself: a supervisor must run for it."""
        return self not in {JobState.SUSPENDED, JobState.COMPLETE, JobState.FAILED}

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for slots, or for its supervisor to request some."""
        return self in {JobState.CREATED, JobState.QUEUED, JobState.PREEMPTED}

    @property
    def holds_slots(self) -> bool:
        """Whether it has processes, or is about to have some."""
        return self in {JobState.RUNNING, JobState.RESUMING, JobState.SUSPENDING, JobState.RESTARTING}

    @property
    def is_over(self) -> bool:
        """Whether it has ended by itself, complete or failed."""
        return self in {JobState.COMPLETE, JobState.FAILED}


class Wanted(enum.StrEnum):
    """The action that is requested of a job; commands set it, and supervisors carry it out."""

    RUN = "run"
    SUSPEND = "suspend"
    PREEMPT = "preempt"
    DELETE = "delete"
