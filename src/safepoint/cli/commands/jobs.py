"""The commands for jobs: list, status, logs, events, suspend, resume, scale, delete."""

import contextlib
import dataclasses
import json
import logging
from types import ModuleType
from typing import Annotated

import typer

from safepoint.cli.cluster_options import Namespace, On, Place, refuse_without_cluster
from safepoint.cli.job_answers import HEAD, job_document, page, row
from safepoint.cli.output import print_answer, print_warning, table, versioned
from safepoint.errors import ConflictError, NotFoundError, PartlyDoneError, SafepointError, StorageError, printable
from safepoint.foundation.events import console
from safepoint.foundation.units import plural
from safepoint.jobs.local.attempt.logs import FOLDER
from safepoint.jobs.local.history import History
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.paths import history_file, job_folder
from safepoint.jobs.local.slots import count_slots, remark_on
from safepoint.jobs.model.job_progress import risk_of_suspending
from safepoint.jobs.model.records import JobState


def complete_job(incomplete: str) -> list[str]:
    """Complete a job's name in a shell; without suggestions if the history cannot be read."""
    logging.disable()  # a shell would show a message in the middle of its line
    try:
        with contextlib.suppress(SafepointError, OSError):
            if history_file().exists():  # otherwise `History` would create the file
                with History() as history:
                    return [job.name for job in history.summaries() if job.name.startswith(incomplete)]
        return []
    finally:
        logging.disable(logging.NOTSET)


Name = Annotated[
    str,
    typer.Argument(metavar="JOB", help="Name of the job, or its first letters.", autocompletion=complete_job),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Timeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Stop waiting after this time.", min=0.1, show_default="no limit"),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.", show_default=False)]


def _place(on: str | None, namespace: str | None) -> Place | None:
    """The cluster that the options name; None for this machine."""
    if on is None:
        refuse_without_cluster(namespace)
        return None
    return Place(on=on, namespace=namespace)


def on_cluster() -> ModuleType:
    """The commands for jobs on a cluster; their libraries take 0.2 s to import."""
    from safepoint.cli import on_cluster

    return on_cluster


def list_(
    active: Annotated[
        bool, typer.Option("--active", help="Only jobs that run, or will run without another command.")
    ] = False,
    on: On = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """List the jobs, newest first, with state, progress, time left, loss and safe step.

    The safe step is the step of the newest checkpoint.
    """

    if place := _place(on, namespace):
        on_cluster().list_(place, active=active, as_json=as_json)
        return

    def is_listed(state: JobState) -> bool:
        return state.is_active or not active

    with LocalJobs() as jobs:
        if as_json:
            listed = [job for job in reversed(jobs.jobs()) if is_listed(job.state)]
            print_answer(as_json, [job_document(job, jobs.progress_of(job)) for job in listed], [])
            return
        rows = [row(job, jobs.progress_of(job)) for job in reversed(jobs.summaries()) if is_listed(job.state)]
        print_answer(as_json, [], table(HEAD, rows) if rows else ["no jobs"])


def status(name: Name, on: On = None, namespace: Namespace = None, as_json: Json = False) -> None:
    """Show one job: its command, progress, output location and attempts."""
    if place := _place(on, namespace):
        on_cluster().status(place, name, as_json=as_json)
        return
    with LocalJobs() as jobs:
        job = jobs.job(name)
        progress, attempts = jobs.progress_of(job), jobs.attempts(job.name)
        document = job_document(job, progress)
        document["attempts"] = [dataclasses.asdict(attempt) for attempt in attempts]
        print_answer(as_json, document, page(job, progress, attempts, jobs.output_of(job)))


def logs(
    name: Name,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Print new lines until the job has stopped.")
    ] = False,
    rank: Annotated[int | None, typer.Option(metavar="R", help="Only the output of this rank.", min=0)] = None,
    on: On = None,
    namespace: Namespace = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document for each line.")] = False,
) -> None:
    """Print the output of a job's launchers and ranks.

    If the job has several ranks, each line begins with the name of its process.
    """
    if place := _place(on, namespace):
        on_cluster().logs(place, name, follow=follow, rank=rank, as_json=as_json)
        return
    only = None if rank is None else range(rank, rank + 1)
    with LocalJobs() as jobs:
        job = jobs.job(name)
        spec = job.spec
        num_ranks = spec.num_nodes * spec.ranks_per_node
        # A rank of an earlier, larger number of nodes still has its log.
        has_printed = (job_folder(job.name) / FOLDER / f"rank-{rank}.log").exists()
        if rank is not None and rank >= num_ranks and not has_printed:
            there = "0 only" if num_ranks == 1 else f"0 to {num_ranks - 1}"
            raise NotFoundError(f"job {job.name} has no rank {rank}", hint=f"its ranks are {there}")
        is_alone = only is not None or num_ranks == 1
        for line in jobs.logs(name, ranks=only, nodes=None if only is None else range(0), follow=follow):
            if as_json:
                typer.echo(json.dumps(versioned({"source": line.source, "text": line.text})))
            else:
                typer.echo(line.text if is_alone else f"{line.source} | {line.text}")


def events(name: Name, on: On = None, namespace: Namespace = None, as_json: Json = False) -> None:
    """Print the events of a job, oldest first, with the cause of each."""
    if place := _place(on, namespace):
        on_cluster().events(place, name, as_json=as_json)
        return
    with LocalJobs() as jobs:
        happened = jobs.events(name)
    rows = [
        [
            event.time,
            event.actor,
            event.name.replace("_", " "),
            ", ".join(filter(None, [event.cause, *_figures(event.detail)])),
        ]
        for event in happened
    ]
    documents = [
        {"time": event.time, "event": event.name, "actor": event.actor, "cause": event.cause, **event.detail}
        for event in happened
    ]
    print_answer(as_json, documents, table(("TIME", "WHO", "WHAT", "WHY"), rows))


def _figures(detail: dict[str, object]) -> list[str]:
    choice = [str(detail["choice"]).replace("_", " ")] if detail.get("choice") is not None else []
    shown = [key for key in ("step", "attempt", "exit_code", "safe_step", "path") if detail.get(key) is not None]
    return choice + [f"{key.replace('_', ' ')} {detail[key]}" for key in shown]


def suspend(
    name: Name,
    yes: Yes = False,
    timeout: Timeout = None,
    on: On = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Save a checkpoint and stop a job; `resume` continues from it.

    If a save may take longer than the job's grace period, the command asks for confirmation first.

    Exit codes: 0 the job is saved and suspended, or complete; 3 it is suspended without a save; 1 it failed.
    """
    if place := _place(on, namespace):
        on_cluster().suspend(place, name, timeout_s=timeout, as_json=as_json)
        return
    with LocalJobs() as jobs:
        _ask_if_risky(jobs, name, yes=yes)
        job = jobs.suspend(name, timeout_s=timeout)
        progress = jobs.progress_of(job)
        lines = [f"job {job.name} is {job.state}" + (f": {job.message}" if job.message else "")]
        print_answer(as_json, job_document(job, progress), lines)
    if job.state is JobState.FAILED:
        raise SafepointError(
            f"job {job.name} failed before it was suspended", hint=f"see `safepoint logs {job.name}`"
        )
    if job.state is JobState.SUSPENDED and not job.was_saved:
        raise PartlyDoneError(
            f"job {job.name} is suspended, but its last attempt ended without a durable save",
            hint="`resume` continues from the newest checkpoint and repeats the steps after it",
        )


def resume(name: Name, on: On = None, namespace: Namespace = None, as_json: Json = False) -> None:
    """Continue a suspended or failed job from its newest checkpoint."""
    if place := _place(on, namespace):
        on_cluster().resume(place, name, as_json=as_json)
        return
    with LocalJobs() as jobs:
        job = jobs.resume(name)
        print_answer(as_json, job_document(job, jobs.progress_of(job)), [f"job {job.name} resumes"])


def scale(
    name: Name,
    nnodes: Annotated[int, typer.Option(metavar="N", help="The new number of nodes.", min=1)],
    yes: Yes = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Suspend a job, change its number of nodes, and resume it."""
    with LocalJobs() as jobs:
        _ask_if_risky(jobs, name, yes=yes)
        job = jobs.scale(name, nnodes, timeout_s=timeout)
        if remark := remark_on(job.spec, count_slots()):
            print_warning(remark)
        lines = [f"job {job.name} has {plural(nnodes, 'node')} now, and is {job.state}"]
        print_answer(as_json, job_document(job, jobs.progress_of(job)), lines)


def delete(
    name: Name,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Also delete its checkpoints and its final model.")
    ] = False,
    yes: Yes = False,
    timeout: Timeout = None,
    on: On = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Stop a job and remove it from the list; its checkpoints stay.

    With --checkpoints, they are deleted too.
    """
    if place := _place(on, namespace):
        on_cluster().delete(place, name, checkpoints=checkpoints, timeout_s=timeout, as_json=as_json)
        return
    with LocalJobs() as jobs:
        where = "its output folder"
        try:
            job = jobs.job(name)
            name, where = job.name, jobs.output_of(job) or where
        except StorageError:  # its entry cannot be read: the location of its checkpoints is unknown
            if checkpoints:
                raise
        if checkpoints and not yes:
            if not console.is_interactive():
                raise ConflictError(
                    f"deleting the checkpoints of job {name} in {where} cannot be undone; nothing was done",
                    hint="pass --yes to delete them",
                )
            _confirm(f"delete job {name} and all its checkpoints in {where}?")
        num_deleted = jobs.delete(name, with_checkpoints=checkpoints, timeout_s=timeout)
    what = (
        f"{plural(num_deleted, 'checkpoint')} in {where} deleted"
        if checkpoints
        else f"its checkpoints stay in {where}"
    )
    document = {"name": name, "checkpoints_deleted": num_deleted}
    print_answer(as_json, document, [f"job {name} is deleted; {what}"])


def _confirm(question: str) -> None:
    if not typer.confirm(printable(question), err=True):
        raise SafepointError("not confirmed; nothing was done")


def _ask_if_risky(jobs: LocalJobs, name: str, *, yes: bool) -> None:
    job = jobs.job(name)
    risk = risk_of_suspending(job, jobs.progress_of(job))
    if risk is None:
        return
    if yes:
        print_warning(risk)
    elif console.is_interactive():
        _confirm(f"{risk}. Suspend anyway?")
    else:
        raise ConflictError(f"{risk}; nothing was done", hint="wait for the next save, or pass --yes")
