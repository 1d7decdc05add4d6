"""`safepoint freeze`, `safepoint thaw` and `safepoint images …`: process images of jobs, and of other processes.

The result goes to stdout: lines, or one JSON document with `--json`. Progress goes to stderr.
"""

import contextlib
import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safepoint.checkpoint.local.retention import KeepBest, parse_policies
from safepoint.cli.commands.jobs import complete_job
from safepoint.cli.output import print_answer, table
from safepoint.cli.place import Connection
from safepoint.errors import ImageError, NothingValidError, StorageError, UsageError, printable
from safepoint.foundation import clock
from safepoint.foundation.events.console import ProgressLine
from safepoint.foundation.units import format_age, format_bytes, format_duration, plural
from safepoint.jobs.model.records import this_user
from safepoint.transparent.packages import require_packages

if TYPE_CHECKING:
    from safepoint.transparent.images.location import ImageLocation
    from safepoint.transparent.images.manifest import ImageManifest

app = typer.Typer(
    name="images",
    help="List, show, check, copy and delete process images.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_Image = Annotated[
    str,
    typer.Argument(
        metavar="IMAGE",
        help="An image, such as images/image-3 or s3://bucket/images/image-3; or the location of the images, for the "
        "newest one.",
    ),
]
_Place = Annotated[
    str, typer.Argument(metavar="LOCATION", help="The images: a folder, or a prefix in an object store.")
]
_Key = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="The file with the key of the images, 32 bytes.",
        show_default="your own key, ~/.config/safepoint/images.key",
    ),
]


def freeze(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="Name of a job on this machine. The first letters of its name are enough.",
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
            help="Where the image is made: a folder, or a prefix in an object store.",
            show_default="for a job, a folder that is deleted with it",
        ),
    ] = None,
    leave_running: Annotated[
        bool, typer.Option("--leave-running", help="Let the processes run on. Otherwise they are ended.")
    ] = False,
    encrypt: Annotated[bool, typer.Option("--encrypt", help="Encrypt the image with the key.")] = False,
    key: _Key = None,
    connection: Connection = None,
    as_json: _Json = False,
) -> None:
    """Freeze a job, or a process and all its child processes, into an image.

    All processes of a job are stopped at one moment, on all nodes. A frozen job is suspended: `safepoint thaw` lets
    it go on in the middle of a step, and `safepoint resume` continues from its newest checkpoint.

    The image holds the memory of the processes, with all passwords in it. In a folder, only root can read it. It is
    authenticated with your own key, or with the key in --key, so that `safepoint thaw` finds each change. An image
    can use pages of older images in the same place instead of storing them again. `safepoint images show` names the
    images that an image needs: keep them. If something fails, the processes run on, and there is no image.

    Exit codes: 1 a process cannot be frozen, and all run on; 10 there is no such job or process; 11 another process
    writes to the folder, or the job does not run; 16 this machine has no CRIU 4.2 or newer, you are not root, or the
    driver of a GPU that a process uses has no checkpoint API.
    """
    if (job is None) == (pid is None) or (pid is not None and to is None):
        raise UsageError("name a job, or a process with --pid PID and --to LOCATION; nothing was frozen")
    from safepoint.transparent.criu.program import find_criu

    criu = find_criu()
    require_packages()
    # Not at the top, here and below: without numpy, this module must still be importable.
    from safepoint.jobs.local.job_images import freeze_job, images_folder, temporary_folders_of
    from safepoint.transparent.freeze import freeze_trees
    from safepoint.transparent.images.materialise import raw_bytes

    place = _location_only(to) if to is not None else str(images_folder(job or ""))
    with _opened(place, key, is_written=True, is_encrypting=encrypt) as (location, _):
        progress = _progress("storing pages", None)
        if pid is None:
            found = freeze_job(
                criu, job or "", location, is_running_after=leave_running, actor=this_user(), progress=progress
            )
        else:
            carried = temporary_folders_of([pid])
            found = freeze_trees(
                criu, [pid], location, is_running_after=leave_running, carried=carried, progress=progress
            )
    manifest = found.manifest
    num_processes = sum(part.num_processes for part in manifest.parts)
    document = {
        **_document(manifest, location),
        "frozen_s": round(found.frozen_s, 3),
        "is_running": leave_running,
        "staged_in": "memory" if found.is_in_memory else "disk",
    }
    after = "they run on" if leave_running else "they were ended"
    lines = [
        f"{location.where(manifest.name)}: {plural(num_processes, 'process')}, "
        f"{format_bytes(manifest.size_bytes)} for {format_bytes(raw_bytes(manifest))} of memory; {after}",
        f"frozen for {format_duration(found.frozen_s)}; raw pages were written to {document['staged_in']} first",
    ]
    if manifest.sources:
        lines.append(f"needs {', '.join(source.name for source in manifest.sources)}")
    print_answer(as_json, document, lines)


def thaw(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A job on this machine; or an image, such as images/image-3 or s3://bucket/images/image-3; or the "
            "location of the images, for the newest one.",
            autocompletion=complete_job,
        ),
    ],
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Also restore an image that was not made with your key, or with the key in --key."
        ),
    ] = False,
    key: _Key = None,
    connection: Connection = None,
    as_json: _Json = False,
) -> None:
    """Restore the processes of a job or of an image; they go on where they were frozen.

    If the processes of a job make no progress, they are ended, and the job continues from its newest checkpoint.

    The whole image is checked first. Restoring runs the program in the image as you, so an image that was not made
    with your key is refused. With --trust it is restored: use --trust only for images of people whom you trust. If a
    process number in the image is in use on this machine, the processes are restored in a new PID namespace.

    Exit codes: 1 the processes could not be restored; 10 there is no such job, or it has no image; 11 the job runs,
    or has no room; 14 the image is damaged; 16 this machine has no CRIU 4.2 or newer, you are not root, or the memory
    of GPUs cannot be restored here.
    """
    from safepoint.transparent.criu.program import find_criu

    criu = find_criu()
    require_packages()
    from safepoint.jobs.local.job_images import image_of, thaw_job
    from safepoint.transparent.images.manifest import number_of
    from safepoint.transparent.thaw import thaw_image

    job = None
    if "://" not in target and number_of(Path(target).name) is None and not Path(target).is_dir():
        job, target = image_of(target)
    with _opened(target, key, only_authentic=not trust) as (location, found):
        name = found or location.newest()
        manifest = location.read(name)
        progress = _progress("restoring pages", manifest.num_pages * 4096)
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
    print_answer(as_json, document, lines if job is None else [f"job {job} goes on", *lines])


@app.command("list")
def list_(place: _Place, key: _Key = None, connection: Connection = None, as_json: _Json = False) -> None:
    """List the images of a location, newest first."""
    with _opened(_location_only(place), key) as (location, _):
        documents, rows = _listed(location)
    lines = table(["IMAGE", "AGE", "PROGRAM", "SIZE", "MEMORY", "KEY", "STATE"], rows)
    print_answer(as_json, documents, lines if rows else [f"no process images in {place}"])


def _listed(location: "ImageLocation") -> tuple[list[dict[str, Any]], list[list[str]]]:
    from safepoint.transparent.images.materialise import raw_bytes

    documents: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for name in location.names():
        try:
            manifest = location.read(name)
        except ImageError as error:
            documents.append({"name": name, "path": location.where(name), "fault": error.message})
            rows.append([name, "-", "-", "-", "-", "-", "damaged"])
            continue
        faults = location.faults(manifest)
        documents.append({**_document(manifest, location), "fault": str(faults[0]) if faults else None})
        rows.append(
            [
                name,
                format_age(clock.wall_s() - clock.parse_utc(manifest.created)),
                manifest.parts[0].program,
                format_bytes(manifest.size_bytes),
                format_bytes(raw_bytes(manifest)),
                _key_of(manifest, location)[1],
                "damaged" if faults else "complete",
            ]
        )
    return documents, rows


@app.command()
def show(image: _Image, key: _Key = None, connection: Connection = None, as_json: _Json = False) -> None:
    """Show what an image holds, and which other images it needs."""
    with _opened(image, key) as (location, found):
        manifest = location.read(found or location.newest())
    from safepoint.transparent.images.materialise import raw_bytes

    document = {**_document(manifest, location), "manifest": json.loads(manifest.to_bytes())}
    num_pages, num_stored = manifest.num_pages, manifest.num_stored
    num_zero = sum(one.num_zero for one in manifest.page_files)
    lines = [
        f"{location.where(manifest.name)}: {printable(manifest.parts[0].program)}, of {manifest.created}",
        *(
            f"  part {number}: {printable(part.program)}, process {part.root_pid}, "
            f"{plural(part.num_processes, 'process')}"
            for number, part in enumerate(manifest.parts)
        ),
        f"  machine: {manifest.machine.architecture}, Linux {manifest.machine.kernel}, CRIU {manifest.machine.criu}"
        f"{', ' + plural(len(manifest.machine.gpus), 'GPU') if manifest.machine.gpus else ''}",
        f"  pages: {num_pages}, of which {num_zero} zero, {num_pages - num_zero - num_stored} in older images, "
        f"{num_stored} here",
        f"  size: {format_bytes(manifest.size_bytes)} for {format_bytes(raw_bytes(manifest))} of memory",
        f"  needs: {', '.join(source.name for source in manifest.sources) or 'no other image'}",
        f"  key: {_key_of(manifest, location)[1]}",
    ]
    print_answer(as_json, document, lines)


@app.command()
def verify(
    image: _Image,
    as_json: _Json = False,
    deep: Annotated[bool, typer.Option("--deep", help="Read every page and compare its digest.")] = False,
    key: _Key = None,
    connection: Connection = None,
) -> None:
    """Check one image, or all images of a location.

    Without --deep, only the manifests, the tables of pages and the sizes of files are checked. With the key of an
    image, each change of what was read is found, also one that was made on purpose; an encrypted image cannot be
    checked without its key. Exit code 14: an image is damaged, or there is none.
    """
    documents: list[dict[str, Any]] = []
    lines: list[str] = []
    with _opened(image, key) as (location, found):
        from safepoint.transparent.images.materialise import verify as verify_image

        names = [found] if found else location.names()
        if not names:
            raise NothingValidError(f"there is no process image in {image}")
        for name in names:
            fault = None
            try:
                verify_image(location, name, deep=deep)
            except ImageError as error:
                fault = error.message
            documents.append({"name": name, "path": location.where(name), "is_deep": deep, "fault": fault})
            lines.append(f"{name}: {'cannot be restored' if fault else 'valid' if deep else 'complete'}")
            lines += [f"  {fault}"] if fault else []
    print_answer(as_json, documents, lines)
    num_damaged = sum(document["fault"] is not None for document in documents)
    if num_damaged:
        raise ImageError(
            f"{num_damaged} of {plural(len(names), 'image')} in {location.where()} cannot be restored",
            hint="see the faults above; an image also needs the images that `safepoint images show` names",
        )


@app.command()
def prune(
    place: _Place,
    keep: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="Which images to keep. One or more policies, separated by commas: newest=N, every=N (the images "
            "whose number is a multiple of N), younger=2h.",
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    connection: Connection = None,
    as_json: _Json = False,
) -> None:
    """Delete the images that --keep does not select, and that no kept image needs.

    These images always stay: the newest one, the newest valid one, damaged ones, those that are being read, and all
    that one of these needs. Exit code 11: an image is being written there. Exit code 13: an image could not be
    deleted.
    """
    try:
        policies = parse_policies(keep)
    except ValueError as error:
        raise UsageError(f"--keep: {error}") from error
    if any(isinstance(policy, KeepBest) for policy in policies):
        raise UsageError("--keep: an image has no metrics", hint="use newest=N, every=N and younger=2h")
    if not any(policy.is_limit for policy in policies):
        raise UsageError(f"--keep {keep!r} would delete nothing", hint="add newest=N or every=N")
    with _opened(_location_only(place)) as (location, _):
        from safepoint.transparent.images.pruning import prune as prune_images

        found = prune_images(location, policies, is_dry_run=dry_run)
    document = {
        "deleted": [{"name": one.name, "size_bytes": one.size_bytes} for one in found.deleted],
        "needed": list(found.needed),
        "unreadable": list(found.unreadable),
        "failed": [{"name": name, "reason": reason} for name, reason in found.failed],
        "is_dry_run": dry_run,
    }
    word = "would be deleted" if dry_run else "deleted"
    lines = [f"{location.where(one.name)}: {word} ({format_bytes(one.size_bytes)})" for one in found.deleted]
    lines += [f"{name} stays, because a kept image needs it, or may need it" for name in found.needed]
    lines += [f"{name} cannot be read: it may need all older images, so they stay" for name in found.unreadable]
    print_answer(as_json, document, lines or ["nothing to delete"])
    for name, reason in found.failed:
        raise StorageError(
            f"{location.where(name)} cannot be deleted ({reason}); it stays, and so do the older ones, which it may "
            "need",
            hint="fix the owner or the attributes of the folder, then run the command again",
        )


@app.command("copy")
def copy(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="An image, such as images/image-3; or the location of the images, for all complete ones.",
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="The location to copy to. Images keep their names.")],
    connection: Connection = None,
    as_json: _Json = False,
) -> None:
    """Copy images and those that they need to a folder or an object store, and compare every byte.

    No key is needed: encrypted images stay encrypted. An image that DST has already is not copied again. Exit code
    11: DST has another image of the name, and nothing was copied.
    """
    documents: list[dict[str, Any]] = []
    lines: list[str] = []
    with _opened(source) as (location, name), _opened(_location_only(target)) as (to, _):
        from safepoint.transparent.images.copying import check_free, needed_by
        from safepoint.transparent.images.copying import copy as copy_image

        names = [name] if name else _complete(location)
        if not names:
            raise NothingValidError(f"there is no complete process image in {source}; nothing was copied")
        images = needed_by(location, names)
        missing = check_free(images, to)
        for one in images:
            is_new = one in missing
            if is_new:
                copy_image(location, one, to, progress=_progress(f"copying {one.name}", one.size_bytes))
            origin, where = location.where(one.name), to.where(one.name)
            documents.append({"name": one.name, "from": origin, "to": where, "copied": is_new})
            lines.append(
                f"{origin} {'copied to' if is_new else 'exists already as'} {where} ({format_bytes(one.size_bytes)})"
            )
    print_answer(as_json, documents, lines)


def _complete(location: "ImageLocation") -> list[str]:
    """The images whose manifests and files, and those of the images that they need, are there."""
    found: list[str] = []
    for name in location.names():
        with contextlib.suppress(ImageError):
            if not any(location.faults(one) for one in location.chain(location.read(name))):
                found.append(name)
    return found


@contextlib.contextmanager
def _opened(
    place: str,
    key: Path | None = None,
    *,
    is_written: bool = False,
    is_encrypting: bool = False,
    only_authentic: bool = False,
) -> "Generator[tuple[ImageLocation, str | None]]":
    """The location of images, and the name of the image if `place` names a single one."""
    require_packages()
    # Not at the top: without numpy, this module must still be importable.
    from safepoint.transparent.images.opening import key_of, open_images, parse_images

    location, name = parse_images(place)
    used = key_of(key, is_made=is_written)
    with open_images(location, used, is_encrypting=is_encrypting, only_authentic=only_authentic) as images:
        yield images, name


def _location_only(place: str) -> str:
    require_packages()
    from safepoint.transparent.images.opening import parse_images

    if parse_images(place)[1] is not None:
        raise UsageError(
            f"{place} is a single image, and this command needs the location of images",
            hint="give the folder or prefix that contains this image",
        )
    return place


def _key_of(manifest: "ImageManifest", location: "ImageLocation") -> tuple[str | None, str]:
    """The identifier of the key of an image, and words for it."""
    facts = manifest.protection
    if facts is None:
        return None, "none"
    is_known = location.key is not None and location.key.id == facts.key_id
    return facts.key_id, ("yours" if is_known else "another") + (", encrypted" if facts.is_encrypted else "")


def _progress(title: str, all_bytes: int | None) -> Callable[[int], None] | None:
    """Show how much is done, if the whole is known."""
    if all_bytes is None:
        return None
    line, done = ProgressLine(title), 0

    def update(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        line.update(done, all_bytes)

    return update


def _document(manifest: "ImageManifest", location: "ImageLocation") -> dict[str, Any]:
    from safepoint.transparent.images.materialise import raw_bytes

    return {
        "name": manifest.name,
        "path": location.where(manifest.name),
        "created": manifest.created,
        "program": manifest.parts[0].program,
        "num_processes": sum(part.num_processes for part in manifest.parts),
        "size_bytes": manifest.size_bytes,
        "memory_bytes": raw_bytes(manifest),
        "num_pages": manifest.num_pages,
        "num_stored": manifest.num_stored,
        "needs": [source.name for source in manifest.sources],
        "key": _key_of(manifest, location)[0],
        "is_encrypted": manifest.is_encrypted,
    }
