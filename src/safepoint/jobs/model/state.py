"""The states of a job, and what somebody may want of it. Pure: no clock, no processes, no files."""

import enum


class JobState(enum.StrEnum):
    """What a job is. Only its supervisor changes it."""

    CREATED = "Created"
    """Written down; its supervisor is about to take it."""
    QUEUED = "Queued"
    """Waits for free slots."""
    RUNNING = "Running"
    SUSPENDING = "Suspending"
    """Was asked to stop, and saves."""
    SUSPENDED = "Suspended"
    """Stopped by a person; it goes on when one says so."""
    RESUMING = "Resuming"
    """Its processes are there again, and load the newest checkpoint."""
    PREEMPTED = "Preempted"
    """Stopped in favour of a job of higher priority; it goes on by itself."""
    RESTARTING = "Restarting"
    """Its processes were interrupted or killed from outside; it starts again by itself."""
    COMPLETE = "Complete"
    FAILED = "Failed"

    @property
    def is_active(self) -> bool:
        """Whether a supervisor has to be there: it runs, or it will without anybody's doing."""
        return self not in {JobState.SUSPENDED, JobState.COMPLETE, JobState.FAILED}

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for slots, or for its supervisor to ask for some."""
        return self in {JobState.CREATED, JobState.QUEUED, JobState.PREEMPTED}

    @property
    def holds_slots(self) -> bool:
        """Whether it has processes, or is about to have some."""
        return self in {JobState.RUNNING, JobState.RESUMING, JobState.SUSPENDING, JobState.RESTARTING}

    @property
    def is_over(self) -> bool:
        """Whether it has come to its own end, good or bad."""
        return self in {JobState.COMPLETE, JobState.FAILED}


class Wanted(enum.StrEnum):
    """What is wanted of a job; commands change it, and supervisors do what it says."""

    RUN = "run"
    SUSPEND = "suspend"
    PREEMPT = "preempt"
    DELETE = "delete"
