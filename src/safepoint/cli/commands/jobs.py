"""The commands for jobs: list, status, logs, events, suspend, resume, scale, delete."""

from typing import TYPE_CHECKING, Annotated

import typer

from safepoint.cli.job_names import complete_job
from safepoint.cli.output import print_answer, table, versioned

if TYPE_CHECKING:
    from safepoint.jobs.local.local_jobs import LocalJobs

Name = Annotated[
    str,
    typer.Argument(metavar="JOB", help="The job's name, or the beginning of it.", autocompletion=complete_job),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Timeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Wait no longer than this.  [for ever]", min=0.1)
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.", show_default=False)]


def list_(
    active: Annotated[bool, typer.Option("--active", help="Only those that run or will run by themselves.")] = False,
    as_json: Json = False,
) -> None:
    """List the jobs, newest first: state, step, time left, loss, what is safe."""
    from safepoint.cli.job_answers import HEAD, job_document, row
    from safepoint.jobs.local.local_jobs import LocalJobs
    from safepoint.jobs.model.state import JobState

    def is_meant(state: JobState) -> bool:
        return state.is_active or not active

    with LocalJobs() as jobs:
        if as_json:
            told = [job_document(job, jobs.progress_of(job)) for job in reversed(jobs.jobs()) if is_meant(job.state)]
            print_answer(as_json, told, [])
            return
        rows = [row(job, jobs.progress_of(job)) for job in reversed(jobs.summaries()) if is_meant(job.state)]
        print_answer(as_json, [], table(HEAD, rows) if rows else ["no jobs"])


def status(name: Name, as_json: Json = False) -> None:
    """Show one job: what it runs, where it is, what is safe, how its attempts ended."""
    from safepoint.cli.job_answers import attempt_document, job_document, page
    from safepoint.jobs.local.local_jobs import LocalJobs

    with LocalJobs() as jobs:
        job = jobs.job(name)
        progress, attempts = jobs.progress_of(job), jobs.attempts(job.name)
        document = job_document(job, progress)
        document["attempts"] = [attempt_document(attempt) for attempt in attempts]
        print_answer(as_json, document, page(job, progress, attempts, jobs.output_of(job)))


def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Wait for more, until the job has stopped.")] = False,
    rank: Annotated[int | None, typer.Option(metavar="R", help="Only what this rank has printed.", min=0)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document for each line.")] = False,
) -> None:
    """Print what the job's processes have printed; with several, each line says which."""
    import json

    from safepoint.errors import NotFoundError
    from safepoint.jobs.local.attempt.logs import FOLDER
    from safepoint.jobs.local.local_jobs import LocalJobs
    from safepoint.jobs.local.paths import job_folder

    only = None if rank is None else range(rank, rank + 1)
    with LocalJobs() as jobs:
        job = jobs.job(name)
        spec = job.spec
        num_ranks = spec.num_nodes * spec.ranks_per_node
        # One that has printed something before the job was scaled down still has.
        has_printed = (job_folder(job.name) / FOLDER / f"rank-{rank}.log").exists()
        if rank is not None and rank >= num_ranks and not has_printed:
            there = "rank 0 only" if num_ranks == 1 else f"ranks 0 to {num_ranks - 1}"
            raise NotFoundError(f"job {job.name} has no rank {rank}", hint=f"it has {there}")
        is_alone = only is not None or num_ranks == 1
        for line in jobs.logs(name, ranks=only, nodes=None if only is None else range(0), follow=follow):
            if as_json:
                typer.echo(json.dumps(versioned({"source": line.source, "text": line.text})))
            else:
                typer.echo(line.text if is_alone else f"{line.source} | {line.text}")


def events(name: Name, as_json: Json = False) -> None:
    """Print what was done to the job and what it did, in the order of time: who, what, why."""
    from safepoint.cli.job_answers import event_document
    from safepoint.jobs.local.local_jobs import LocalJobs

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
    print_answer(as_json, [event_document(event) for event in happened], table(("TIME", "WHO", "WHAT", "WHY"), rows))


def _figures(detail: dict[str, object]) -> list[str]:
    shown = ("choice", "step", "attempt", "exit_code", "safe_step", "path")
    found = {key: str(detail[key]) for key in shown if detail.get(key) is not None}
    if "choice" in found:  # a word of its own: finish_step, commit_snapshot
        return [found.pop("choice").replace("_", " "), *_named(found)]
    return _named(found)


def _named(figures: dict[str, str]) -> list[str]:
    return [f"{key.replace('_', ' ')} {text}" for key, text in figures.items()]


def suspend(name: Name, yes: Yes = False, timeout: Timeout = None, as_json: Json = False) -> None:
    """Stop a job with a checkpoint, and say which one is safe; `resume` goes on from there.

    When a save would not fit the job's grace period, it says so first, with the figures, and asks.

    Exit codes: 0 suspended and saved, or complete; 3 suspended without a save; 1 the job has failed.
    """
    from safepoint.cli.job_answers import job_document
    from safepoint.errors import PartlyDoneError, SafepointError
    from safepoint.jobs.local.local_jobs import LocalJobs
    from safepoint.jobs.model.state import JobState

    with LocalJobs() as jobs:
        _ask_if_risky(jobs, name, yes=yes)
        job = jobs.suspend(name, timeout_s=timeout)
        progress = jobs.progress_of(job)
        lines = [f"job {job.name} is {job.state}" + (f": {job.message}" if job.message else "")]
        print_answer(as_json, job_document(job, progress), lines)
    if job.state is JobState.FAILED:
        raise SafepointError(f"job {job.name} has failed instead", hint=f"safepoint logs {job.name}")
    if job.state is JobState.SUSPENDED and not job.was_saved:
        raise PartlyDoneError(
            f"job {job.name} is suspended, but its last attempt ended without a save that is safe everywhere",
            hint="what it had trained since its last safe step will be trained again",
        )


def resume(name: Name, as_json: Json = False) -> None:
    """Let a suspended or failed job go on from its newest checkpoint."""
    from safepoint.cli.job_answers import job_document
    from safepoint.jobs.local.local_jobs import LocalJobs

    with LocalJobs() as jobs:
        job = jobs.resume(name)
        print_answer(as_json, job_document(job, jobs.progress_of(job)), [f"job {job.name} goes on"])


def scale(
    name: Name,
    nnodes: Annotated[int, typer.Option(metavar="N", help="The new number of nodes.", min=1)],
    yes: Yes = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Change a job's number of nodes: suspend, change, resume."""
    from safepoint.cli.job_answers import job_document
    from safepoint.jobs.local.local_jobs import LocalJobs
    from safepoint.jobs.local.slots import count_slots, remark_on

    with LocalJobs() as jobs:
        _ask_if_risky(jobs, name, yes=yes)
        job = jobs.scale(name, nnodes, timeout_s=timeout)
        if remark := remark_on(job.spec, count_slots()):
            typer.echo(f"safepoint: warning: {remark}", err=True)
        lines = [f"job {job.name} has {nnodes} node{'s' if nnodes > 1 else ''} now, and is {job.state}"]
        print_answer(as_json, job_document(job, jobs.progress_of(job)), lines)


def delete(
    name: Name,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Its checkpoints and final model, too.")] = False,
    yes: Yes = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Stop a job and forget it; its checkpoints stay, unless they are asked for too."""
    from safepoint.errors import ConflictError, StorageError
    from safepoint.foundation.events.console import is_interactive
    from safepoint.foundation.units import plural
    from safepoint.jobs.local.local_jobs import LocalJobs

    with LocalJobs() as jobs:
        where = "its output folder"
        try:
            job = jobs.job(name)
            name, where = job.name, jobs.output_of(job) or where
        except StorageError:  # its entry cannot be read; it can be forgotten, but nobody knows its checkpoints
            if checkpoints:
                raise
        if checkpoints and not yes:
            if not is_interactive():
                raise ConflictError(
                    f"deleting the checkpoints of job {name} in {where} cannot be taken back; nothing was done",
                    hint="say --yes",
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
    from safepoint.errors import SafepointError

    if not typer.confirm(question, err=True):
        raise SafepointError("the answer was no; nothing was done")


def _ask_if_risky(jobs: "LocalJobs", name: str, *, yes: bool) -> None:
    from safepoint.errors import ConflictError
    from safepoint.foundation.events.console import is_interactive
    from safepoint.jobs.model.risk import risk_of_suspending

    job = jobs.job(name)
    risk = risk_of_suspending(job, jobs.progress_of(job))
    if risk is None:
        return
    if yes:
        typer.echo(f"safepoint: warning: {risk}", err=True)
    elif is_interactive():
        _confirm(f"{risk}. Suspend all the same?")
    else:
        raise ConflictError(f"{risk}; nothing was done", hint="wait for the next save, or say --yes")
