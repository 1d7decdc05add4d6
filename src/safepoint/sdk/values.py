"""Results of the client: Kubeflow's types, with additional fields."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from safepoint.errors import UsageError
from safepoint.foundation import clock
from safepoint.jobs.model.states import JobState
from safepoint.sdk.upstream import constants, types

if TYPE_CHECKING:  # at run time these imports would slow down the import of the SDK
    from safepoint.checkpoint.tools.inventory import Item
    from safepoint.jobs.model.receipts import Receipt
    from safepoint.jobs.model.records import JobEvent, JobRecord
    from safepoint.notebook.views import JobView
    from safepoint.progress.record import Progress

STATUSES = frozenset(str(state) for state in JobState)
"""The values of a job's `status`: Kubeflow's Created, Running, Complete and Failed, and Safepoint's own states."""


def states_of(status: Collection[str], polling_interval: float) -> list[JobState]:
    """The states that `wait_for_job_status` waits for.

    Raises:
        UsageError: `status` is empty, or contains something that is not a state of a job; or the interval is invalid.
    """
    if polling_interval <= 0:
        raise UsageError(f"polling_interval {polling_interval} must be more than 0")
    unknown = sorted(set(status) - STATUSES)
    if unknown or not status:
        raise UsageError(f"status {unknown or status} is invalid", hint=f"use some of {', '.join(sorted(STATUSES))}")
    return [JobState(one) for one in status]


_STEP_STATUS = {JobState.COMPLETE: "Succeeded", JobState.FAILED: "Failed"}


@dataclass(repr=False)
class TrainJob(types.TrainJob):
    """A job, with fields that Kubeflow's TrainJob does not have. A notebook shows it like a page of the dashboard.

    Args:
        progress: the progress of the training (docs/progress.md); None before the first report.
        message: the reason for the `status`; may be empty.
        exit_code: the exit code of the last attempt (docs/exit-codes.md); None before the first attempt has ended,
            and if its processes were killed.
        attempts: how many times the job was started.
        safe_step: the step of the newest checkpoint; None while no checkpoint is known.
        output_dir: the location of the job's checkpoints; None while it is unknown.
        receipt: the checkpoint that the suspension of this job has saved, and the result of its check. It is set in
            the result of `suspend_job`. On a cluster, it is also set for every suspended job, and in the result of
            `scale_job`, because `scale_job` suspends the job first. None for other jobs, and if the suspension saved
            no checkpoint that could be checked.
        image: the location of its newest process image, if `resume_job` may use it; None if no image is known.
        view: the facts about the job that a notebook shows; None if there are none.
    """

    progress: "Progress | None" = None
    message: str = ""
    exit_code: int | None = None
    attempts: int = 0
    safe_step: int | None = None
    output_dir: str | None = None
    receipt: "Receipt | None" = None
    image: str | None = None
    view: "JobView | None" = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"<TrainJob {self._line()}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from safepoint.notebook.text import job_text

        printer.text(repr(self) if cycle or self.view is None else job_text(self.view))

    def _repr_html_(self) -> str | None:
        from safepoint.notebook.html import job_html

        return None if self.view is None else job_html(self.view)

    def _line(self) -> str:
        from safepoint.notebook.text import job_line

        return f"{self.name}: {self.status}" if self.view is None else job_line(self.view)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint of a job, or its final model.

    Args:
        name: `checkpoint-<step>` or `final`.
        step: the number of optimizer steps done; None if the manifest cannot be read.
        path: the full location of the checkpoint.
        trigger: why the checkpoint exists: `periodic`, `jit`, `on-demand`, `failure`, `final`; None if the manifest
            cannot be read.
        created: when the checkpoint was saved.
        size_bytes: the size of all its files.
        num_files: the number of its files.
        is_complete: whether all files in the manifest exist and have the sizes in the manifest. The contents of files
            are checked by `safepoint checkpoints verify --deep`, and before a resume.
    """

    name: str
    step: int | None
    path: str
    trigger: str | None
    created: datetime
    size_bytes: int
    num_files: int
    is_complete: bool


def train_job(
    job: "JobRecord",
    runtime: types.Runtime,
    progress: "Progress | None",
    output: str | None,
    *,
    view: "JobView",
    receipt: "Receipt | None" = None,
) -> TrainJob:
    """Convert a job of this machine into the type that the client returns."""
    return TrainJob(
        name=job.name,
        runtime=runtime,
        steps=_steps(job),
        num_nodes=job.spec.num_nodes,
        creation_timestamp=clock.parse_date(job.created),
        status=str(job.state),
        progress=progress,
        message=job.message,
        exit_code=job.exit_code,
        attempts=job.attempt,
        safe_step=job.safe_step,
        output_dir=output,
        receipt=receipt,
        image=job.image,
        view=view,
    )


def _steps(job: "JobRecord") -> list[types.Step]:
    """The steps of a job, as Kubeflow calls its parts: one `Step` for each initializer, then one for each node.

    A job that waits or is suspended has none, because it has no processes.
    """
    if not job.state.holds_slots and not job.state.is_over:
        return []
    spec = job.spec
    device, count = ("gpu", spec.gpu_per_node) if spec.gpu_per_node else ("cpu", spec.cpu_per_node)
    names = [*(one.step for one in spec.inputs), *(f"{constants.NODE}-{node}" for node in range(spec.num_nodes))]
    return [
        types.Step(
            name=name,
            status=_STEP_STATUS.get(job.state, constants.TRAINJOB_RUNNING),
            pod_name=f"{job.name}-{name}",
            device=device,
            device_count=str(count),
        )
        for name in names
    ]


def event_of(job: str, event: "JobEvent") -> types.Event:
    """Convert an event into the type that the client returns, with a reason of one word and a message."""
    figures = ", ".join(f"{name} {value}" for name, value in event.detail.items() if isinstance(value, (int, str)))
    what = event.name.replace("_", " ")
    return types.Event(
        involved_object_kind=constants.TRAINJOB_KIND,
        involved_object_name=job,
        message=": ".join(filter(None, (f"{event.actor}: {what}", event.cause, figures))),
        reason=re.sub(r"(?:^|_)(.)", lambda match: match[1].upper(), event.name),
        event_time=clock.parse_date(event.time),
    )


def checkpoint_of(item: "Item") -> Checkpoint:
    """Convert an item of an inventory into the type that the client returns."""
    stated = item.stated
    return Checkpoint(
        name=item.name,
        step=None if stated is None else stated.step,
        path=item.where,
        trigger=None if stated is None else str(stated.trigger),
        created=clock.date_of(item.created_s).astimezone(),
        size_bytes=item.size_bytes,
        num_files=item.num_files,
        is_complete=item.is_complete,
    )


def checkpoint_in(document: Mapping[str, Any]) -> Checkpoint:
    """Convert a document of `safepoint checkpoints list --json` into the type that the client returns."""
    from safepoint.checkpoint.tools.inventory import Kind

    return Checkpoint(
        name=document["name"],
        step=document["step"],
        path=document["where"],
        trigger=document["trigger"],
        created=clock.date_of(document["created_s"]).astimezone(),
        size_bytes=document["bytes"],
        num_files=document["files"],
        is_complete=document["kind"] == Kind.CHECKPOINT and document["step"] is not None and not document["faults"],
    )
