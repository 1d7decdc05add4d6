"""Jobs, their events and their output as JSON documents; see docs/jobs.md."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from safepoint.jobs.model.job_place import Job, JobPlace, LogLine, Summary
from safepoint.jobs.model.records import AttemptRecord, JobEvent
from safepoint.progress.record import Progress


def safe_step(job: Summary, progress: Progress | None) -> int | None:
    """The step of the newest checkpoint; None if it is not known."""
    if progress is None or progress.safe_step is None or not job.state.holds_slots:
        return job.safe_step
    return max(progress.safe_step, job.safe_step or 0)


def job_document(jobs: JobPlace[Any], job: Job) -> dict[str, Any]:
    """The job as a JSON document; see docs/jobs.md."""
    return document_of(job, jobs.progress_of(job), jobs.output_of(job))


def document_of(job: Job, progress: Progress | None, output: str | None) -> dict[str, Any]:
    """The job as a JSON document, made from values that were read before.

    Args:
        job: the job.
        progress: its last report; None if there is no report.
        output: its output location; None if it is unknown.
    """
    return {
        "name": job.name,
        "state": str(job.state),
        "message": job.message,
        "command": job.command,
        "output_dir": output,
        "num_nodes": job.num_nodes,
        "ranks_per_node": job.ranks_per_node,
        **job.particulars,
        "created": job.created,
        "attempt": job.attempt,
        "exit_code": job.exit_code,
        "safe_step": safe_step(job, progress),
        "progress": None if progress is None else progress.to_document(),
    }


def status_document(
    job: Job,
    progress: Progress | None,
    output: str | None,
    attempts: Sequence[AttemptRecord],
    details: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The job with its attempts and details, as JSON."""
    document = {**document_of(job, progress, output), **(details or {})}
    document["attempts"] = [dataclasses.asdict(attempt) for attempt in attempts]
    return document


def event_document(event: JobEvent) -> dict[str, Any]:
    """An event as JSON."""
    return {"time": event.time, "event": event.name, "actor": event.actor, "cause": event.cause, **event.detail}


def log_document(line: LogLine) -> dict[str, str]:
    """A line of output as JSON."""
    return {"source": line.source, "text": line.text}


def figures_of(detail: Mapping[str, object]) -> list[str]:
    """The values of an event that a person wants to see, as phrases such as `step 100`."""
    choice = [str(detail["choice"]).replace("_", " ")] if detail.get("choice") is not None else []
    names = ("object", "step", "attempt", "exit_code", "safe_step", "path")
    shown = [key for key in names if detail.get(key) is not None]
    return choice + [f"{key.replace('_', ' ')} {detail[key]}" for key in shown]


def event_rows(events: Sequence[JobEvent]) -> list[dict[str, str]]:
    """Events for a table, newest first: `time`, `actor`, `what` and `why`."""
    return [
        {
            "time": event.time,
            "actor": event.actor,
            "what": event.name.replace("_", " "),
            "why": ", ".join(itertools.chain(filter(None, [event.cause]), figures_of(event.detail))),
        }
        for event in reversed(events)
    ]
