"""The commands for jobs: list, status, logs, events, suspend, resume, scale, delete."""

import contextlib
import json
import logging
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from safepoint.answers.details import details_of
from safepoint.answers.job_documents import event_document, figures_of, job_document, log_document, status_document
from safepoint.answers.versions import versioned
from safepoint.cli.cluster_options import (
    SHORT_S,
    THIS_MACHINE,
    Namespace,
    OnOfJob,
    OnOfList,
    open_jobs,
    options_of,
    places_to_list,
)
from safepoint.cli.job_answers import HEAD, page, row, timed_starts, with_reasons
from safepoint.cli.output import print_answer, print_log_line, print_warning, table
from safepoint.errors import (
    ConflictError,
    PartlyDoneError,
    SafepointError,
    StorageError,
    UnsupportedError,
    printable,
)
from safepoint.foundation.events import console
from safepoint.foundation.units import plural
from safepoint.jobs.local.history import History
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.paths import history_file
from safepoint.jobs.model.job_place import HasDetails, JobPlace, Summary
from safepoint.jobs.model.job_progress import risk_of_suspending
from safepoint.jobs.model.states import JobState


def complete_job(incomplete: str) -> list[str]:
    """The names of jobs that begin with `incomplete`, for shell completion; empty if the history cannot be read."""
    logging.disable()  # a message would appear in the middle of the line that the user types
    try:
        with contextlib.suppress(SafepointError, OSError):
            if history_file().exists():  # without this check, `History` would create the file
                with History() as history:
                    return [job.name for job in history.summaries() if job.name.startswith(incomplete)]
        return []
    finally:
        logging.disable(logging.NOTSET)


Name = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Name of the job. For a job on this machine, the first letters of its name are enough.",
        autocompletion=complete_job,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Timeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Stop waiting after this time.", min=0.1, show_default="no limit"),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.", show_default=False)]


def list_(
    active: Annotated[
        bool,
        typer.Option(
            "--active", help="Leave out jobs that are suspended, complete or failed, or that are being deleted."
        ),
    ] = False,
    on: OnOfList = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """List the jobs, newest first: state, progress, time left, loss and saved step.

    The saved step (SAFE STEP) is the step of the newest checkpoint.
    """

    def is_listed(state: JobState) -> bool:
        return state.is_active or not active

    documents: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    found: list[Summary] = []
    places = places_to_list(on, namespace)
    is_short = len(places) > 1
    for place in places:
        try:
            with open_jobs(place, namespace, within_s=SHORT_S if is_short else None) as jobs:
                everything: Sequence[Any] = jobs.jobs() if as_json else jobs.summaries()
                listed = [job for job in reversed(everything) if is_listed(job.state)]
                own = {"place": str(place)} if is_short else {}
                documents += [{**job_document(jobs, job), **own} for job in listed] if as_json else []
                rows += [[*row(job, jobs.progress_of(job)), *own.values()] for job in listed]
                found += listed
        except SafepointError as error:
            if place == THIS_MACHINE or not is_short:
                raise
            print_warning(f"the jobs of place {place} cannot be listed: {error}")
    head = (*HEAD, "PLACE") if is_short else HEAD
    print_answer(as_json, documents, with_reasons(head, rows, found) if rows else ["no jobs"])


def status(
    name: Name,
    verbose: Annotated[
        bool,
        typer.Option(
            "-v",
            "--verbose",
            help="For jobs on this machine: also show the phases of the last starts of the ranks, and how many "
            "seconds after the start each phase ended.",
        ),
    ] = False,
    on: OnOfJob = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Show one job: its command, progress, output location and attempts."""
    with open_jobs(on, namespace, name) as jobs:
        job = jobs.job(name)
        attempts = jobs.attempts(job.name)
        progress, output = jobs.progress_of(job), jobs.output_of(job)
        starts = timed_starts(jobs.events(job.name)) if verbose else ()
        details = details_of(jobs, job)
        if progress is None and isinstance(jobs, HasDetails):
            progress = jobs.progress_in_log(job)
        suggested = options_of(on, namespace)
        lines = page(job, progress, attempts, output, starts=starts, details=details, options=suggested)
        print_answer(as_json, status_document(job, progress, output, attempts, details), lines)


def logs(
    name: Name,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Continue to print new lines until the job has stopped.")
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="R",
            help="Print only the output of this rank (training process). On a cluster, print the output of its pod.",
            min=0,
        ),
    ] = None,
    on: OnOfJob = None,
    namespace: Namespace = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document for each line.")] = False,
) -> None:
    """Print the output of a job's launchers and ranks.

    If the job has several ranks (training processes), each line begins with the name of the process or pod that
    printed the line.

    The lines have no times. So the output is grouped by process or pod: first what prepares the job (packages, data,
    model), then the launchers, then the ranks. Each group is in the order of time. With --follow, new lines of all
    processes come in the order in which they were written, except for fractions of a second. `safepoint events` shows
    what happened in the order of time.
    """
    with open_jobs(on, namespace, name) as jobs:
        job = jobs.job(name)
        is_alone = rank is not None or job.num_nodes * (job.ranks_per_node or 1) == 1
        for line in jobs.logs(name, rank=rank, follow=follow):
            if as_json:
                typer.echo(json.dumps(versioned(log_document(line))))
            else:
                print_log_line(line.text if is_alone else f"{line.source} | {line.text}")


def events(name: Name, on: OnOfJob = None, namespace: Namespace = None, as_json: Json = False) -> None:
    """Print the events of a job, oldest first, with the cause of each."""
    with open_jobs(on, namespace, name) as jobs:
        happened = jobs.events(name)
    rows = [
        [
            event.time,
            event.actor,
            event.name.replace("_", " "),
            ", ".join(filter(None, [event.cause, *figures_of(event.detail)])),
        ]
        for event in happened
    ]
    documents = [event_document(event) for event in happened]
    print_answer(as_json, documents, table(("TIME", "WHO", "WHAT", "WHY"), rows))


def suspend(
    name: Name,
    yes: Yes = False,
    timeout: Timeout = None,
    on: OnOfJob = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Save a checkpoint and stop a job; `resume` continues from it.

    If a save may take longer than the job's grace period, the command asks for confirmation first.

    Exit codes: 0 the job is suspended and was saved; 0 also if the job has never run, or completes in the meantime; 1
    the job fails in the meantime; 3 the job is suspended, but was not saved; 11 the job has already ended; 15 the
    job has not stopped within --timeout.
    """
    with open_jobs(on, namespace, name) as jobs:
        _ask_if_risky(jobs, name, yes=yes)
        job = jobs.suspend(name, timeout_s=timeout)
        lines = [f"job {job.name} is {job.state}" + (f": {job.message}" if job.message else "")]
        print_answer(as_json, {**job_document(jobs, job), "was_saved": job.was_saved}, lines)
    if job.state is JobState.FAILED:
        raise SafepointError(
            f"job {job.name} failed before it was suspended",
            hint=f"see `safepoint logs {job.name}{options_of(on, namespace)}`",
        )
    if job.state is JobState.SUSPENDED and job.was_saved is False:
        raise PartlyDoneError(
            f"job {job.name} is suspended, but its last attempt ended without a durable save",
            hint="`safepoint resume` continues from the newest checkpoint, and repeats the steps after it",
        )


def resume(
    name: Name,
    step: Annotated[
        int | None,
        typer.Option(
            "--from",
            metavar="STEP",
            help="Continue from the checkpoint of this step. Possible only if the checkpoints are in a folder of "
            "this machine.",
            min=0,
        ),
    ] = None,
    from_checkpoint: Annotated[
        bool,
        typer.Option(
            "--from-checkpoint",
            help="Continue from the newest checkpoint, even if a process image of the job is newer. Possible only "
            "for a job on this machine.",
        ),
    ] = False,
    on: OnOfJob = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Continue a suspended or failed job from its newest checkpoint, or from an older one.

    The newest attempt of the job may have a process image that is newer than the checkpoint. If the image can be
    restored, the job continues from the image, as after `safepoint thaw`. The command says whether it uses the image
    or the checkpoint. For a job on a cluster, the log of the pod says this. With --from, newer checkpoints are moved
    aside. On a cluster, a failed job cannot be resumed; submit it again.
    """
    with open_jobs(on, namespace, name) as jobs:
        if isinstance(jobs, LocalJobs):
            job = jobs.resume(name, step=step, from_checkpoint=from_checkpoint)
            reason = f" {job.message}" if job.message else ""
        elif step is not None:
            raise UnsupportedError(
                f"--from is not possible for job {name}, because it is on a cluster; nothing was changed",
                hint="submit another job, with another output location and --resume PATH",
            )
        elif from_checkpoint:
            raise UnsupportedError(
                f"--from-checkpoint is not possible for job {name}, because it is on a cluster; nothing was changed",
                hint="leave --from-checkpoint out; or, if the job has a newer process image that you do not want, "
                "delete the job (its checkpoints stay) and submit it again",
            )
        else:
            job, reason = jobs.resume(name), ""
        print_answer(as_json, job_document(jobs, job), [f"job {job.name} resumes{reason}"])


def scale(
    name: Name,
    nnodes: Annotated[int, typer.Option(metavar="N", help="The new number of nodes.", min=1)],
    yes: Yes = False,
    timeout: Timeout = None,
    on: OnOfJob = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Change a job's number of nodes; a running job is suspended and resumed.

    If a save may take longer than the job's grace period, the command asks for confirmation first.
    """
    with open_jobs(on, namespace, name) as jobs:
        _ask_if_risky(jobs, name, yes=yes)
        job = jobs.scale(name, nnodes, timeout_s=timeout)
        if remark := jobs.remark_on(job):
            print_warning(remark)
        lines = [f"job {job.name} has {plural(nnodes, 'node')} now, and is {job.state}"]
        print_answer(as_json, job_document(jobs, job), lines)


def delete(
    name: Name,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Also delete the job's checkpoints and its final model.")
    ] = False,
    yes: Yes = False,
    timeout: Timeout = None,
    on: OnOfJob = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Stop a job and remove it from the list; its checkpoints stay.

    With --checkpoints, the checkpoints and the final model are deleted too.
    """
    with open_jobs(on, namespace, name) as jobs:
        where = "its output location"
        try:
            job = jobs.job(name)
            name, where = job.name, jobs.output_of(job) or where
        except StorageError:  # the entry of the job cannot be read, so the location of its checkpoints is unknown
            if checkpoints:
                raise
        if checkpoints and not yes:
            if not console.is_interactive():
                raise ConflictError(
                    f"deleting the checkpoints of job {name} in {where} cannot be undone; nothing was done",
                    hint="pass --yes to delete the job and its checkpoints",
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


def _ask_if_risky(jobs: JobPlace[Any], name: str, *, yes: bool) -> None:
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
