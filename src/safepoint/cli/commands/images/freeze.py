"""`safepoint freeze` and `safepoint thaw`."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safepoint.answers.job_documents import job_document
from safepoint.cli.cluster_options import Namespace, OnOfJob, open_jobs, options_of, refuse_on_cluster
from safepoint.cli.commands.images.common import Json, KeyOption, document_of, location_only, opened, page_progress
from safepoint.cli.commands.jobs import complete_job
from safepoint.cli.interruption import undoing
from safepoint.cli.output import print_answer
from safepoint.cli.place import Connection
from safepoint.errors import UsageError, printable
from safepoint.foundation.units import format_bytes, format_duration, plural
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.model.job_place import JobPlace
from safepoint.jobs.model.records import this_user
from safepoint.transparent.packages import require_packages

if TYPE_CHECKING:
    from safepoint.jobs.cluster.cluster_jobs import ClusterJobs


def freeze(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="Name of a job. For a job on this machine, the first letters of its name are enough.",
            autocompletion=complete_job,
            show_default=False,
        ),
    ] = None,
    pid: Annotated[
        int | None,
        typer.Option(
            "--pid",
            metavar="PID",
            min=1,
            help="A process to freeze instead of a job, together with all its child processes.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="LOCATION",
            help="Where to store the image: a folder, or a prefix in an object store.",
            show_default="for a job, a folder that is deleted with the job",
        ),
    ] = None,
    leave_running: Annotated[
        bool, typer.Option("--leave-running", help="Let the processes continue. Otherwise they are ended.")
    ] = False,
    encrypt: Annotated[bool, typer.Option("--encrypt", help="Encrypt the image with the key.")] = False,
    key: KeyOption = None,
    connection: Connection = None,
    on: OnOfJob = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Freeze a job, or a process and all its child processes, into an image.

    All processes of a job are stopped at the same moment, on all nodes. Without --leave-running, the job is then
    suspended: `safepoint thaw` continues the job in the middle of a step. `safepoint resume` does the same if the
    image can be used and is newer than all checkpoints. Otherwise the job continues from its newest checkpoint.

    The image contains the memory of the processes, with all passwords in this memory. If the image is in a folder,
    only root can read the image. The image is authenticated with your own key, or with the key in --key, so that
    `safepoint thaw` detects every change. An image can use pages of older images in the same location instead of
    storing them again. `safepoint images show` names the images that an image needs: keep them. If the freeze fails,
    the processes continue to run, and there is no image. If another command changes the job during the freeze, or if
    the job ends, the image is kept.

    A job of a cluster can be frozen if it was submitted with --freeze-as-last-resort. Its pod makes the image in the
    output location, and `safepoint resume` continues the job from this image in another pod.

    Exit codes: 1 a process cannot be frozen, and all continue to run; 10 there is no such job or process; 11 another
    process writes images to the folder, the job does not run, or the job was changed or ended meanwhile; 16 this
    machine has no CRIU 4.2 or newer, you are not root, a process uses a GPU whose driver has no checkpoint API, or
    the pods of the job cannot make images.
    """
    if (job is None) == (pid is None) or (pid is not None and to is None):
        raise UsageError("name a job, or a process with --pid PID and --to LOCATION; nothing was frozen")
    if job is not None:
        with open_jobs(on, namespace, job) as jobs:
            if not isinstance(jobs, LocalJobs):
                local = {"--to": to, "--encrypt": encrypt or None, "--key": key, "--connection": connection}
                shown = options_of(on, namespace)
                _freeze_on_cluster(jobs, job, local, leave_running=leave_running, shown=shown, as_json=as_json)
                return
            jobs.job(job)  # an unknown job is reported before a missing program
    elif on is not None or namespace is not None:
        raise UsageError("--on and --namespace are for jobs, and not for processes; nothing was frozen")
    from safepoint.transparent.criu.program import find_criu

    criu = find_criu()
    require_packages()
    # The imports are here and below, and not at the top: the module must be importable without numpy.
    from safepoint.jobs.local.images.job_images import freeze_job, images_folder
    from safepoint.jobs.local.images.last_resort import carried_folders
    from safepoint.transparent.freeze import freeze_trees
    from safepoint.transparent.images.materialise import raw_bytes

    place = location_only(to) if to is not None else str(images_folder(job or ""))
    with (
        undoing("an incomplete image is deleted, and the processes continue to run, unless the image is complete"),
        opened(place, key, is_written=True, is_encrypting=encrypt) as (location, _),
    ):
        progress = page_progress("storing pages", None)
        if pid is None:
            found = freeze_job(
                criu, job or "", location, is_running_after=leave_running, actor=this_user(), progress=progress
            )
        else:
            carried = carried_folders([pid])
            found = freeze_trees(
                criu, [pid], location, is_running_after=leave_running, carried=carried, progress=progress
            )
    manifest = found.manifest
    num_processes = sum(part.num_processes for part in manifest.parts)
    document = {
        **document_of(manifest, location),
        "frozen_s": round(found.frozen_s, 3),
        "is_running": leave_running,
        "staged_in": "memory" if found.is_in_memory else "disk",
    }
    after = "still running" if leave_running else "ended after the freeze"
    lines = [
        f"{location.where(manifest.name)}: {plural(num_processes, 'process')} with "
        f"{format_bytes(raw_bytes(manifest))} of memory, {after}; size of the image: "
        f"{format_bytes(manifest.size_bytes)}",
        f"frozen for {format_duration(found.frozen_s)}; raw pages were written to {document['staged_in']} first",
    ]
    if manifest.sources:
        lines.append(f"needs {', '.join(source.name for source in manifest.sources)}")
    print_answer(as_json, document, lines)


def _of_cluster(jobs: JobPlace[Any], local: Mapping[str, object]) -> "ClusterJobs":
    """The jobs of a cluster. Raise UsageError if one of the options `local`, which have no effect on a cluster, was
    given."""
    from safepoint.jobs.cluster.cluster_jobs import ClusterJobs  # not at the top: the import takes 0.2 s

    assert isinstance(jobs, ClusterJobs)
    refuse_on_cluster(jobs.place, local)
    return jobs


def _freeze_on_cluster(
    place: JobPlace[Any],
    name: str,
    local: Mapping[str, object],
    *,
    leave_running: bool,
    shown: str,
    as_json: bool,
) -> None:
    """Freeze a job of a cluster, and print the image.

    Args:
        place: the jobs of the cluster.
        name: the job.
        local: the options that have an effect only for a job on this machine. If one of them was given, it is
            refused.
        leave_running: whether the job continues to run.
        shown: the options that name the cluster, for the command that the output suggests.
        as_json: see `print_answer`.
    """
    from safepoint.jobs.local.images.image_request import HOLD_S

    jobs = _of_cluster(place, local)
    with undoing(
        "the job runs on, unless it was suspended already; its pod may still complete the image; processes "
        f"that are stopped continue after at most {HOLD_S:g} s"
    ):
        job, image = jobs.freeze(name, is_running_after=leave_running)
    document = {**asdict(image), "is_running": leave_running, "job": job_document(jobs, job)}
    after = "the job runs on" if leave_running else f"the job is {job.state}"
    lines = [
        f"{image.path}: {plural(image.num_processes, 'process')} with {format_bytes(image.memory_bytes)} of memory; "
        f"size of the image: {format_bytes(image.size_bytes)}; the image was read and checked; {after}"
    ]
    if image.needs:
        lines.append(f"needs {', '.join(map(printable, image.needs))}")
    if not leave_running:
        lines.append(f"to continue the job from this image: safepoint thaw {job.name}{shown}")
    print_answer(as_json, document, lines)


def _thaw_on_cluster(
    place: JobPlace[Any], name: str, local: Mapping[str, object], *, shown: str, as_json: bool
) -> None:
    """Let the next pod of a job of a cluster restore the image of the job. For the arguments, see
    `_freeze_on_cluster`."""
    jobs = _of_cluster(place, local)
    job, image = jobs.thaw(name)
    document = {"image": image.path, "job": job.name, "state": str(job.state), "program": image.program}
    lines = [
        f"job {job.name} resumes; its next pod restores {image.path}, if it finds no newer checkpoint",
        f"the output of the pod says what the job continues from: safepoint logs {job.name}{shown}",
    ]
    print_answer(as_json, document, lines)


def thaw(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A job; or an image, such as images/image-3 or s3://bucket/images/image-3; or a location of images. "
            "From a location, the newest image is restored.",
            autocompletion=complete_job,
        ),
    ],
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Restore the image even if it was made with another key, or without a key."),
    ] = False,
    key: KeyOption = None,
    connection: Connection = None,
    on: OnOfJob = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Restore the frozen processes of a job or of an image, and let them continue.

    If the restored processes of a job make no progress, they are ended, and the job continues from its newest
    checkpoint.

    The whole image is checked first. A restored program runs with your rights. So the command accepts only images
    that were made with your own key. With --key, it accepts only images that were made with the key in FILE. With
    --trust, it also restores other images: use --trust only for images of people whom you trust. If a process number
    in the image is in use on this machine, the processes are restored in a new PID namespace.

    For a job of a cluster, the command first checks that the job has an image, and that no checkpoint is newer than
    the image. Then it does what `safepoint resume` does: a new pod restores the newest image, which was made with the
    key of the job.

    Exit codes: 1 the processes could not be restored; 10 there is no such job, or it has no image; 11 the job runs,
    other jobs use its CPUs or GPUs, or a checkpoint of the job is newer than the image (on a cluster); 14 the image
    is damaged, or was made with another key; 16 this machine has no CRIU 4.2 or newer, you are not root, or this
    machine cannot restore the memory of GPUs.
    """
    from safepoint.jobs.local.images.job_images import image_of, is_job, thaw_job

    names_job = on is not None or namespace is not None or is_job(target)
    if names_job:
        with open_jobs(on, namespace, target) as jobs:
            if not isinstance(jobs, LocalJobs):
                local = {"--trust": trust or None, "--key": key, "--connection": connection}
                _thaw_on_cluster(jobs, target, local, shown=options_of(on, namespace), as_json=as_json)
                return
            jobs.job(target)
    from safepoint.transparent.criu.program import find_criu

    criu = find_criu()
    require_packages()
    from safepoint.transparent.thaw import thaw_image

    job = None
    if names_job:
        job, target = image_of(target)
    with (
        undoing("if all processes of the image were restored before the signal, they run; if not, none of them runs"),
        opened(target, key, only_authentic=not trust) as (location, found),
    ):
        name = found or location.newest()
        manifest = location.read(name)
        progress = page_progress("restoring pages", manifest.num_pages * 4096)
        if job is None:
            trees = thaw_image(criu, location, name, progress=progress)
        else:
            trees = thaw_job(criu, job, location, name, actor=this_user(), progress=progress)
    document = {
        "image": location.where(name),
        "job": job,
        "pid": trees[0].pid,
        "has_own_namespace": trees[0].in_namespace,
        "program": manifest.parts[0].program,
        "trees": [
            {"pid": tree.pid, "has_own_namespace": tree.in_namespace, "program": part.program}
            for tree, part in zip(trees, manifest.parts, strict=True)
        ],
    }
    lines = [
        f"{name}: {printable(part.program)} runs as process {tree.pid}"
        + (" in a new PID namespace" if tree.in_namespace else "")
        for tree, part in zip(trees, manifest.parts, strict=True)
    ]
    print_answer(as_json, document, lines if job is None else [f"job {job} continues", *lines])
