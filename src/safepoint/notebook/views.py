"""What a cell shows of jobs and checkpoints, as frozen values.

Promises: the values can be copied and pickled, like the results of `TrainerClient`. No file is read to make a value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from safepoint.answers.job_documents import safe_step
from safepoint.answers.receipts import facts_of
from safepoint.answers.situation import Attention, attention_of, sentence_of
from safepoint.foundation import clock
from safepoint.jobs.model.job_place import Job
from safepoint.jobs.model.job_progress import risk_of_suspending
from safepoint.jobs.model.receipts import Receipt
from safepoint.jobs.model.records import AttemptRecord, JobEvent
from safepoint.jobs.model.states import JobState
from safepoint.progress.metric_history import MetricPoint
from safepoint.progress.record import Progress

_LATER_S = 1.0
"""Details that are this many seconds newer than the read of a job still belong to it, because they were written while
the job was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """A checkpoint in a table.

    Args:
        name: `checkpoint-<step>` or `final`.
        state: such as `complete` or `damaged`.
        trigger: why it was saved; None if its manifest cannot be read.
        size_bytes: the size of all its files.
        num_files: how many files it has.
        created_s: when it was saved, in seconds since 1970.
        path: its full location.
    """

    name: str
    state: str
    trigger: str | None
    size_bytes: int
    num_files: int
    created_s: float
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetails:
    """What is read of a job when a cell shows the job.

    Args:
        points: the metrics over the steps.
        attempts: oldest first.
        events: oldest first.
        checkpoints: newest first; None if they were not read.
    """

    points: Sequence[MetricPoint] = ()
    attempts: Sequence[AttemptRecord] = ()
    events: Sequence[JobEvent] = ()
    checkpoints: Sequence[CheckpointView] | None = None

    def until(self, time_s: float) -> "JobDetails":
        """The details up to a time, which is in seconds since 1970."""
        return replace(
            self,
            points=[point for point in self.points if _is_until(point.time, time_s)],
            attempts=[attempt for attempt in self.attempts if _is_until(attempt.started, time_s)],
            events=[event for event in self.events if _is_until(event.time, time_s)],
            checkpoints=None
            if self.checkpoints is None
            else [one for one in self.checkpoints if one.created_s <= time_s + _LATER_S],
        )


ReadDetails = Callable[[], JobDetails]
"""Reads the details of a job from files of this machine. It raises SafepointError if they cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """What a cell shows of a job.

    Args:
        name: the name of the job.
        state: its state.
        message: why it is in this state; may be empty.
        sentence: what it is doing, and why.
        attention: why it needs attention.
        risk: a warning if a save may not fit into the grace period; otherwise empty.
        progress: its last report; None if there is none.
        safe_step: the step of its newest checkpoint; None if no checkpoint is known.
        output: the location of its checkpoints; None if it is unknown.
        num_nodes: how many nodes it has.
        ranks_per_node: the number of ranks on each node; None if it is unknown.
        attempt: the number of its newest start.
        exit_code: the exit code of its last attempt; None if there is no exit code.
        created: when it was created, RFC 3339 UTC.
        receipt: names and values of what its suspension has saved; empty if there is no receipt.
        read_s: when it was read, in seconds since 1970.
        details: reads its curves, events and checkpoints; None for a job on a cluster.
    """

    name: str
    state: JobState
    message: str
    sentence: str
    attention: Attention
    risk: str
    progress: Progress | None
    safe_step: int | None
    output: str | None
    num_nodes: int
    ranks_per_node: int | None
    attempt: int
    exit_code: int | None
    created: str
    receipt: tuple[tuple[str, str], ...]
    read_s: float
    details: ReadDetails | None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the job needs attention. Reasons that are already in its sentence are left out."""
        return tuple(reason for reason in self.attention.reasons if reason.rstrip(".") not in self.sentence)

    @property
    def has_stopped(self) -> bool:
        """Whether the job has stopped, and does not continue by itself."""
        return self.state.is_over or self.state is JobState.SUSPENDED


def view_of(
    job: Job,
    progress: Progress | None,
    output: str | None,
    *,
    receipt: Receipt | None = None,
    details: ReadDetails | None = None,
) -> JobView:
    """What a cell shows of a job that was read now.

    Args:
        job: the job.
        progress: its last report; None if there is none.
        output: the location of its checkpoints; None if it is unknown.
        receipt: what its suspension has saved; None if there is no receipt.
        details: reads its curves, events and checkpoints; None for a job on a cluster.
    """
    changed = job.particulars.get("changed")
    return JobView(
        name=job.name,
        state=job.state,
        message=job.message,
        sentence=sentence_of(job, progress),
        attention=attention_of(job, progress, changed=changed if isinstance(changed, str) else None),
        risk=risk_of_suspending(job, progress) or "",
        progress=progress,
        safe_step=safe_step(job, progress),
        output=output,
        num_nodes=job.num_nodes,
        ranks_per_node=job.ranks_per_node,
        attempt=job.attempt,
        exit_code=job.exit_code,
        created=job.created,
        receipt=() if receipt is None else facts_of(receipt.to_document()),
        read_s=clock.wall_s(),
        details=details,
    )


def _is_until(time: str, time_s: float) -> bool:
    try:
        return clock.parse_utc(time) <= time_s + _LATER_S
    except ValueError:
        return False
