"""Implements `safepoint submit --on PLACE`, for jobs on a cluster."""

import io
import json
import os
import secrets
import stat
import zipfile
from dataclasses import replace
from pathlib import Path

import typer

from safepoint.answers.job_documents import job_document
from safepoint.cli.cluster_options import SubmitOptions, connected, options_of
from safepoint.cli.output import print_answer
from safepoint.errors import UsageError, printable
from safepoint.jobs.cluster.objects import Object, texts
from safepoint.jobs.cluster.planned_sizes import outline_of, parse_local_limit, planned_in
from safepoint.jobs.cluster.shared_memory import parse_shared_memory
from safepoint.jobs.cluster.spec import DEFAULT_RUNTIME, RECORD, ClusterSpec, kubernetes_resources, read_record
from safepoint.jobs.model.spec import name_from
from safepoint.planning.submitted import needs_of
from safepoint.settings.run_settings import RunSettings, variable

_MOST_CODE_BYTES = 512 << 20
"""The maximum size of all files of `--code` together."""


def spec_of(
    program: list[str],
    options: SubmitOptions,
    settings: RunSettings,
    *,
    given: frozenset[str],
    name: str | None,
    is_module: bool,
    num_nodes: int,
    ranks: int | str,
    cpu: int | None,
    gpu: int | None,
    env: dict[str, str],
    connection: str | None,
    max_restarts: int,
) -> ClusterSpec:
    """The specification of a job, from the options of `submit --on`.

    Args:
        program: the script or module, and its arguments.
        options: the options for jobs on a cluster only.
        settings: the options of the run.
        given: the names of the options that are set, including options that are set to their defaults; see
            `given_options`.
        ranks: the number of ranks in each pod, or `auto`, `cpu` or `gpu`.
        cpu: CPU cores of each pod.
        gpu: GPUs of each pod.

    `ClusterSpec` describes the other arguments.

    Raises:
        UsageError: the script or the folder of `--code` cannot be read, or an option is invalid.
    """
    script, *arguments = program
    files: dict[str, bytes] = {}
    code = None if options.code is None else zip_of(options.code)
    is_sent = not is_module and not script.startswith("/")
    if options.code is not None and is_sent and not (options.code / script).is_file():
        raise UsageError(
            f"there is no file {script} in --code {options.code}; nothing was submitted",
            hint="give the path of the script in that folder",
        )
    if code is None and is_sent:
        files[Path(script).name] = _read(Path(script))
        script = Path(script).name
    asked = {"cpu": cpu, "gpu": gpu, "memory": options.memory}
    resources = kubernetes_resources({key: value for key, value in asked.items() if value})
    limit, shared = options.local_limit, options.shared_memory
    spec = ClusterSpec(
        name=name_from(Path(program[0]).stem, secrets.token_hex(2)) if name is None else name,
        program=(script, *arguments),
        is_module=is_module,
        files=files,
        code=code,
        num_nodes=num_nodes,
        ranks_per_node=ranks if isinstance(ranks, int) else {"cpu": cpu, "gpu": gpu}.get(ranks),
        ranks_from=None if isinstance(ranks, int) or ranks == "auto" else ranks,
        resources=resources,
        settings=settings,
        env=env,
        connection=connection,
        runtime=options.runtime or DEFAULT_RUNTIME,
        image=options.image,
        queue=options.queue,
        priority_class=options.priority_class,
        given=frozenset(map(variable, given)),
        grace_s=round(settings.grace_s) if "grace" in given else None,
        staging_bytes=None if limit is None else parse_local_limit("--local-limit", limit, settings),
        is_staging_given=limit is not None,
        shared_memory_bytes=None if shared is None else parse_shared_memory("--shared-memory", shared, resources),
        max_restarts=max_restarts,
    )
    return replace(spec, needs=needs_of(outline_of(spec), arguments, code=options.code))


def zip_of(folder: Path) -> bytes:
    """A zip of all files in a folder and its subfolders, without hidden files and caches.

    The same files give the same bytes.

    Raises:
        UsageError: `folder` is not a folder, or the files in it are too large together. Also if a file cannot be
            read, has a name that cannot be printed, or is a link to a file outside of the folder.
    """
    if not folder.is_dir():
        raise UsageError(
            f"--code {folder} is not a folder; nothing was submitted",
            hint="give the folder that has the script, or leave --code out",
        )
    root = folder.resolve()
    buffer, left = io.BytesIO(), _MOST_CODE_BYTES
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(folder.rglob("*")):
            inner = path.relative_to(folder)
            if any(part.startswith(".") or part == "__pycache__" for part in inner.parts) or not path.is_file():
                continue
            if not str(inner).isprintable():
                raise UsageError(
                    f"--code {folder}: {printable(str(inner))} is a name that cannot be printed; nothing was sent",
                    hint="rename or delete the file",
                )
            data, is_program = _read_inside(folder, root, inner, left)
            left -= len(data)
            entry = zipfile.ZipInfo(str(inner), (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o755 if is_program else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data, compresslevel=9)
    return buffer.getvalue()


def _read_inside(folder: Path, root: Path, inner: Path, left: int) -> tuple[bytes, bool]:
    """The content of a file of the folder, and whether it is a program.

    The file is opened first, and then checked: it must be inside the folder. If the path were checked first, another
    user could replace it by a link before it is opened.
    """
    try:
        descriptor = os.open(folder / inner, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status, place = os.fstat(descriptor), Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if not place.is_relative_to(root) or not stat.S_ISREG(status.st_mode):
                raise UsageError(
                    f"--code {folder}: {inner} is a link to {place}, outside the folder; nothing was sent",
                    hint="if the job needs the file, replace the link with the file; if not, delete the link",
                )
            data = file.read(left + 1) if status.st_size <= left else b""
    except OSError as error:
        raise UsageError(f"{folder / inner} cannot be read: {error.strerror}", hint="check the path") from error
    if status.st_size > left or len(data) > left:
        raise UsageError(
            f"--code {folder} has more than {_MOST_CODE_BYTES:,} bytes; nothing was sent",
            hint="move data out of the folder; the pods can read it from a claim or an object store",
        )
    return data, bool(status.st_mode & 0o100)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="check the path") from error


def submit(on: str, namespace: str | None, spec: ClusterSpec, *, is_dry_run: bool, as_json: bool) -> None:
    """Submit a job and print it. With `is_dry_run`, only print the objects that would be created."""
    with connected(on, namespace) as jobs:
        if is_dry_run:
            _print_objects(jobs.preview(spec), as_json=as_json)
            return
        job = jobs.submit(spec)
        options = options_of(on, namespace)
        lines = [f"job {job.name} is {job.state} in namespace {job.namespace} of {job.place}"]
        if "memory" in spec.resources:
            memory = spec.resources["memory"]
            lines.append(f"each pod has {memory} of memory, for the training, its snapshots and /dev/shm together")
        lines += job.planned
        lines.append("")
        lines += [f"  safepoint {command} {job.name}{options}" for command in ("status", "logs -f", "suspend")]
        print_answer(as_json, job_document(jobs, job), lines)


def _print_objects(objects: list[Object], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=1))
        return
    import yaml

    shown = [
        {**item, "stringData": dict.fromkeys(item["stringData"], "…")} if "stringData" in item else item
        for item in objects
    ]
    # These lines are comments of YAML, so the output stays valid YAML.
    for text in planned_in(read_record(texts(objects[-1], "metadata", "annotations").get(RECORD))):
        typer.echo(f"# {printable(text)}")
    typer.echo("---\n".join(yaml.safe_dump(item, sort_keys=False) for item in shown).rstrip())
