"""`safepoint freeze`, `safepoint thaw` and `safepoint images …`: process images in a folder.

The result goes to stdout: lines, or one JSON document with `--json`. Progress goes to stderr.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safepoint.cli.output import print_answer, table
from safepoint.errors import ImageError, NothingValidError, UsageError, printable
from safepoint.foundation import clock
from safepoint.foundation.events.console import ProgressLine
from safepoint.foundation.units import format_age, format_bytes, format_duration, plural
from safepoint.transparent.packages import require_packages

if TYPE_CHECKING:
    from safepoint.transparent.images.location import ImageLocation
    from safepoint.transparent.images.manifest import ImageManifest

app = typer.Typer(
    name="images",
    help="List, show and check the process images in a folder.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_Image = Annotated[
    Path,
    typer.Argument(
        metavar="IMAGE", help="An image, such as images/image-3; or the folder with the images, for the newest one."
    ),
]
_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder with the images.")]


def freeze(
    pid: Annotated[
        int,
        typer.Option(
            "--pid", metavar="PID", min=1, help="The process to freeze, together with all its child processes."
        ),
    ],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="The folder in which the image is made.")],
    leave_running: Annotated[
        bool, typer.Option("--leave-running", help="Let the processes run on. Otherwise they are ended.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Freeze a process and all its child processes into an image.

    The image holds the memory of the processes, with all passwords in it. Only root can read it. An image can use
    pages of older images in the folder instead of storing them again. `safepoint images show` names the images that
    an image needs: keep them. If something fails, the processes run on, and there is no image.

    Exit codes: 1 a process cannot be frozen, and all processes run on; 10 there is no such process; 11 another
    process writes to the folder; 16 this machine has no CRIU 4.2 or newer, you are not root, or the driver of a GPU
    that a process uses has no checkpoint API.
    """
    from safepoint.transparent.criu.program import find_criu

    criu = find_criu()
    require_packages()
    # Not at the top, here and below: without numpy, this module must still be importable.
    from safepoint.transparent.freeze import freeze_tree
    from safepoint.transparent.images.location import ImageLocation
    from safepoint.transparent.images.materialise import raw_bytes

    found = freeze_tree(
        criu, pid, ImageLocation(to), is_running_after=leave_running, progress=_progress("storing pages", None)
    )
    manifest = found.manifest
    document = {
        **_document(manifest, to),
        "frozen_s": round(found.frozen_s, 3),
        "is_running": leave_running,
        "staged_in": "memory" if found.is_in_memory else "disk",
    }
    after = "they run on" if leave_running else "they were ended"
    lines = [
        f"{to / manifest.name}: {plural(manifest.parts[0].num_processes, 'process')}, "
        f"{format_bytes(manifest.size_bytes)} for {format_bytes(raw_bytes(manifest))} of memory; {after}",
        f"frozen for {format_duration(found.frozen_s)}; raw pages were written to {document['staged_in']} first",
    ]
    if manifest.sources:
        lines.append(f"needs {', '.join(source.name for source in manifest.sources)}")
    print_answer(as_json, document, lines)


def thaw(image: _Image, as_json: _Json = False) -> None:
    """Restore the processes of an image; they go on where they were frozen.

    The whole image is checked first. Restoring runs the program in the image: restore only images that you, or people
    whom you trust, have made. If a process number in the image is in use on this machine, the processes are restored
    in a new PID namespace.

    Exit codes: 1 the processes could not be restored; 14 the image is damaged; 16 this machine has no CRIU 4.2 or
    newer, you are not root, or the memory of GPUs cannot be restored here.
    """
    from safepoint.transparent.criu.program import find_criu

    criu = find_criu()
    require_packages()
    from safepoint.transparent.thaw import thaw_image

    location, name = _find(image)
    manifest = location.read(name)
    restored = thaw_image(criu, location, name, progress=_progress("restoring pages", manifest))
    document = {
        "image": str(location.path(name)),
        "pid": restored.pid,
        "has_own_namespace": restored.in_namespace,
        "program": manifest.parts[0].program,
    }
    where = " in a new PID namespace" if restored.in_namespace else ""
    print_answer(as_json, document, [f"{name}: {manifest.parts[0].program} runs as process {restored.pid}{where}"])


@app.command("list")
def list_(folder: _Folder, as_json: _Json = False) -> None:
    """List the images of a folder, newest first."""
    require_packages()
    from safepoint.transparent.images.location import ImageLocation
    from safepoint.transparent.images.materialise import raw_bytes

    location = ImageLocation(folder)
    documents: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for name in location.names():
        try:
            manifest = location.read(name)
        except ImageError as error:
            documents.append({"name": name, "path": str(location.path(name)), "fault": error.message})
            rows.append([name, "-", "-", "-", "-", "damaged"])
            continue
        faults = location.faults(manifest)
        documents.append({**_document(manifest, folder), "fault": str(faults[0]) if faults else None})
        rows.append(
            [
                name,
                format_age(clock.wall_s() - clock.parse_utc(manifest.created)),
                manifest.parts[0].program,
                format_bytes(manifest.size_bytes),
                format_bytes(raw_bytes(manifest)),
                "damaged" if faults else "complete",
            ]
        )
    lines = table(["IMAGE", "AGE", "PROGRAM", "SIZE", "MEMORY", "STATE"], rows)
    print_answer(as_json, documents, lines if rows else [f"no process images in {folder}"])


@app.command()
def show(image: _Image, as_json: _Json = False) -> None:
    """Show what an image holds, and which other images it needs."""
    require_packages()
    from safepoint.transparent.images.materialise import raw_bytes

    location, name = _find(image)
    manifest = location.read(name)
    document = {**_document(manifest, location.folder), "manifest": json.loads(manifest.to_bytes())}
    num_pages, num_stored = manifest.num_pages, manifest.num_stored
    num_zero = sum(one.num_zero for one in manifest.page_files)
    lines = [
        f"{location.path(name)}: {printable(manifest.parts[0].program)}, of {manifest.created}",
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
    ]
    print_answer(as_json, document, lines)


@app.command()
def verify(
    image: _Image,
    as_json: _Json = False,
    deep: Annotated[bool, typer.Option("--deep", help="Read every page and compare its digest.")] = False,
) -> None:
    """Check one image, or all images of a folder.

    Without --deep, only the manifests, the tables of pages and the sizes of files are checked. Exit code 14: an image
    is damaged, or there is none.
    """
    require_packages()
    from safepoint.transparent.images.location import ImageLocation
    from safepoint.transparent.images.manifest import number_of
    from safepoint.transparent.images.materialise import verify as verify_image

    is_one = number_of(image.name) is not None
    location = ImageLocation(image.parent if is_one else image)
    names = [image.name] if is_one else location.names()
    if not names:
        raise NothingValidError(f"there is no process image in {image}")
    documents: list[dict[str, Any]] = []
    lines: list[str] = []
    for name in names:
        fault = None
        try:
            verify_image(location, name, deep=deep, progress=_progress(f"reading {name}", None) if deep else None)
        except ImageError as error:
            fault = error.message
        documents.append({"name": name, "path": str(location.path(name)), "is_deep": deep, "fault": fault})
        lines.append(f"{name}: {'damaged' if fault else 'valid' if deep else 'complete'}")
        lines += [f"  {fault}"] if fault else []
    print_answer(as_json, documents, lines)
    num_damaged = sum(document["fault"] is not None for document in documents)
    if num_damaged:
        raise ImageError(
            f"{num_damaged} of {plural(len(names), 'image')} in {location.folder} cannot be restored",
            hint="see the faults above; an image also needs the images that `safepoint images show` names",
        )


def _find(image: Path) -> "tuple[ImageLocation, str]":
    from safepoint.transparent.images.location import ImageLocation
    from safepoint.transparent.images.manifest import number_of

    if number_of(image.name) is not None:
        return ImageLocation(image.parent), image.name
    location = ImageLocation(image)
    if not image.is_dir():
        raise UsageError(f"{image} is neither an image nor a folder", hint="name FOLDER/image-N, or FOLDER")
    return location, location.newest()


def _progress(title: str, manifest: "ImageManifest | None") -> Callable[[int], None] | None:
    """Show how much of the pages is done, if the whole is known."""
    if manifest is None:
        return None
    line, done, all_bytes = ProgressLine(title), 0, manifest.num_pages * 4096

    def update(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        line.update(done, all_bytes)

    return update


def _document(manifest: "ImageManifest", folder: Path) -> dict[str, Any]:
    from safepoint.transparent.images.materialise import raw_bytes

    return {
        "name": manifest.name,
        "path": str(folder / manifest.name),
        "created": manifest.created,
        "program": manifest.parts[0].program,
        "num_processes": sum(part.num_processes for part in manifest.parts),
        "size_bytes": manifest.size_bytes,
        "memory_bytes": raw_bytes(manifest),
        "num_pages": manifest.num_pages,
        "num_stored": manifest.num_stored,
        "needs": [source.name for source in manifest.sources],
    }
