"""The commands for jobs with `--on PLACE`: the same as those for jobs of this machine, on a cluster."""

import contextlib
import io
import json
import secrets
import zipfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import typer

from safepoint.cli.cluster_options import Place, SubmitOptions
from safepoint.cli.job_answers import progress_lines
from safepoint.cli.output import print_answer, table, versioned
from safepoint.errors import ConflictError, PartlyDoneError, SafepointError, UsageError, printable
from safepoint.foundation.units import format_age, plural
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs, Receipt
from safepoint.jobs.cluster.connection import connect_to
from safepoint.jobs.cluster.objects import Object
from safepoint.jobs.cluster.spec import DEFAULT_RUNTIME, ClusterSpec, kubernetes_resources
from safepoint.jobs.cluster.state import ClusterJob, age_s
from safepoint.jobs.model.records import JobState
from safepoint.jobs.model.spec import name_from
from safepoint.settings.run_settings import RunSettings

_HEAD = ("JOB", "STATE", "AGE", "STEP", "LOSS", "SAFE STEP", "COMMAND", "WHY")
_WIDE = 60


@contextlib.contextmanager
def open_jobs(place: Place) -> Generator[ClusterJobs]:
    """The jobs of a place."""
    with ClusterApi(connect_to(None if place.on == "." else place.on, namespace=place.namespace)) as api:
        yield ClusterJobs(api)


def spec_of(
    program: list[str],
    options: SubmitOptions,
    settings: RunSettings,
    *,
    name: str | None,
    is_module: bool,
    num_nodes: int,
    ranks: int | None,
    cpu: int | None,
    gpu: int | None,
    env: dict[str, str],
    connection: str | None,
    max_restarts: int,
) -> ClusterSpec:
    """The job that `submit --on` makes of its options.

    Raises:
        UsageError: the script or the folder of the code cannot be read.
    """
    script, *arguments = program
    files: dict[str, bytes] = {}
    code = None if options.code is None else zip_of(options.code)
    if code is None and not is_module and not script.startswith("/"):
        files[Path(script).name] = _read(Path(script))
        script = Path(script).name
    asked = {"cpu": cpu, "gpu": gpu, "memory": options.memory}
    own_grace = settings.grace_s != RunSettings().grace_s
    return ClusterSpec(
        name=name_from(Path(program[0]).stem, secrets.token_hex(2)) if name is None else name,
        program=(script, *arguments),
        is_module=is_module,
        files=files,
        code=code,
        num_nodes=num_nodes,
        ranks_per_node=ranks,
        resources=kubernetes_resources({key: value for key, value in asked.items() if value}),
        settings=settings,
        env=env,
        connection=connection,
        runtime=options.runtime or DEFAULT_RUNTIME,
        image=options.image,
        queue=options.queue,
        priority_class=options.priority_class,
        grace_s=round(settings.grace_s) if own_grace else None,
        max_restarts=max_restarts,
    )


def zip_of(folder: Path) -> bytes:
    """The files below a folder in a zip; the same files give the same bytes. Hidden files and caches are left out.

    Raises:
        UsageError: it is not a folder, or a file in it cannot be read.
    """
    if not folder.is_dir():
        raise UsageError(f"--code {folder} is not a folder")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(folder.rglob("*")):
            inner = path.relative_to(folder)
            if any(part.startswith(".") or part == "__pycache__" for part in inner.parts) or not path.is_file():
                continue
            entry = zipfile.ZipInfo(str(inner), (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o755 if path.stat().st_mode & 0o100 else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, _read(path), compresslevel=9)
    return buffer.getvalue()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="check the path") from error


def submit(place: Place, spec: ClusterSpec, *, is_dry_run: bool, as_json: bool) -> None:
    """Submit a job, or print its objects."""
    with open_jobs(place) as jobs:
        if is_dry_run:
            _print_objects(jobs.manifests(spec).documents, as_json=as_json)
            return
        jobs.repair()
        job = jobs.submit(spec)
    on = f"--on {place.on} {job.name}"
    lines = [f"job {job.name} is {job.state} in namespace {job.namespace} of {job.place}", ""]
    lines += [f"  safepoint {command} {on}" for command in ("status", "logs -f", "suspend")]
    print_answer(as_json, document_of(job), lines)


def _print_objects(objects: list[Object], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=1))
        return
    import yaml

    shown = [
        {**item, "stringData": dict.fromkeys(item["stringData"], "…")} if "stringData" in item else item
        for item in objects
    ]
    typer.echo("---\n".join(yaml.safe_dump(item, sort_keys=False) for item in shown).rstrip())


def list_(place: Place, *, active: bool, as_json: bool) -> None:
    """List the jobs of a namespace."""
    with open_jobs(place) as jobs:
        found = [job for job in reversed(jobs.jobs()) if job.state.is_active or not active]
    rows = [_row(job) for job in found]
    print_answer(as_json, [document_of(job) for job in found], table(_HEAD, rows) if rows else ["no jobs"])


def _row(job: ClusterJob) -> list[str]:
    progress = job.progress
    step = "-" if progress is None else str(progress.step)
    if progress is not None and progress.max_steps:
        step += f"/{progress.max_steps}"
    loss = None if progress is None else progress.loss
    return [
        job.name,
        str(job.state),
        format_age(age_s(job)),
        step,
        "-" if loss is None else f"{loss:.4g}",
        "-" if job.safe_step is None else str(job.safe_step),
        _short(job.command) if job.is_ours else "(not submitted by Safepoint)",
        _short(job.message),
    ]


def _short(text: str) -> str:
    return text if len(text) <= _WIDE else text[: _WIDE - 1] + "…"


def status(place: Place, name: str, *, as_json: bool) -> None:
    """Show one job."""
    with open_jobs(place) as jobs:
        job = jobs.job(name)
    size = plural(job.num_nodes, "node")
    if job.ranks_per_node is not None:
        size += f", {plural(job.ranks_per_node, 'rank')} on each"
    lines = [f"{job.name}: {job.state}" + (f" ({job.message})" if job.message else "")]
    lines += [f"  runs        {job.command}"] if job.command else []
    lines += [f"  on          {job.place}, namespace {job.namespace}", f"  size        {size}"]
    lines += [f"  queue       {job.queue}"] if job.queue else []
    lines += [f"  output      {job.output}"] if job.output else []
    if job.progress is not None:
        lines += [f"  {line}" for line in progress_lines(job.progress, job.state)]
    if job.exit_code is not None and job.state.is_over:
        lines.append(f"  exit code   {job.exit_code}")
    print_answer(as_json, document_of(job), [printable(line) for line in lines])


def logs(place: Place, name: str, *, follow: bool, rank: int | None, as_json: bool) -> None:
    """Print the output of the pods."""
    if rank is not None:
        raise UsageError("--rank is not supported with --on: a pod writes the lines of all its ranks")
    with open_jobs(place) as jobs:
        has_several = jobs.job(name).num_nodes > 1
        for line in jobs.logs(name, follow=follow):
            if as_json:
                typer.echo(json.dumps(versioned({"source": line.source, "text": line.text})))
            else:
                typer.echo(f"{line.source} | {line.text}" if has_several else line.text)


def events(place: Place, name: str, *, as_json: bool) -> None:
    """Print what the cluster reports about a job."""
    with open_jobs(place) as jobs:
        found = jobs.events(name)
    rows = [[event.time, str(event.detail["object"]), event.name, event.cause] for event in found]
    documents = [
        {"time": event.time, "event": event.name, "actor": event.actor, "cause": event.cause, **event.detail}
        for event in found
    ]
    print_answer(as_json, documents, table(("TIME", "OBJECT", "WHAT", "WHY"), rows))


def suspend(place: Place, name: str, *, timeout_s: float | None, as_json: bool) -> None:
    """Stop a job with a checkpoint, and print what it has saved."""
    with open_jobs(place) as jobs:
        receipt = jobs.suspend(name, timeout_s=timeout_s)
    job = receipt.job
    print_answer(
        as_json,
        {**document_of(job), "safe_step": receipt.safe_step, "is_saved": receipt.is_saved},
        list(_receipt(receipt)),
    )
    if job.state is JobState.FAILED:
        raise SafepointError(f"job {name} failed before it was suspended")
    if receipt.is_saved is False:
        raise PartlyDoneError(
            f"job {name} is suspended, but a pod ended without a save",
            hint="`resume` continues from the newest checkpoint and repeats the steps after it",
        )


def _receipt(receipt: Receipt) -> Iterator[str]:
    job = receipt.job
    yield f"job {job.name} is {job.state}" + (f" {job.message}" if job.message else "")
    if receipt.safe_step is not None:
        yield f"  step {receipt.safe_step} is saved" + (f" in {job.output}" if job.output else "")


def resume(place: Place, name: str, *, as_json: bool) -> None:
    """Let a suspended job go on."""
    with open_jobs(place) as jobs:
        job = jobs.resume(name)
    print_answer(as_json, document_of(job), [f"job {job.name} resumes"])


def delete(place: Place, name: str, *, checkpoints: bool, timeout_s: float | None, as_json: bool) -> None:
    """Delete a job; its checkpoints stay."""
    if checkpoints:
        raise ConflictError(
            "--checkpoints is not supported with --on; nothing was done",
            hint="delete the job, then its folder or bucket with your own tools",
        )
    with open_jobs(place) as jobs:
        where = jobs.job(name).output or "its output location"
        jobs.delete(name, timeout_s=timeout_s)
    document = {"name": name, "checkpoints_deleted": 0}
    print_answer(as_json, document, [f"job {name} is deleted; its checkpoints stay in {where}"])


def document_of(job: ClusterJob) -> dict[str, Any]:
    """The job as JSON."""
    return {
        "name": job.name,
        "place": job.place,
        "namespace": job.namespace,
        "state": str(job.state),
        "message": job.message,
        "command": job.command,
        "output_dir": job.output,
        "num_nodes": job.num_nodes,
        "ranks_per_node": job.ranks_per_node,
        "queue": job.queue,
        "created": job.created,
        "attempt": job.attempt,
        "exit_code": job.exit_code,
        "safe_step": job.safe_step,
        "is_ours": job.is_ours,
        "progress": None if job.progress is None else job.progress.to_document(),
    }
