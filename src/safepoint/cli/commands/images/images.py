"""`safepoint images …`: lists, checks, copies and deletes process images."""

import contextlib
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safepoint.checkpoint.local.retention import KeepBest, parse_policies
from safepoint.cli.claims.from_outside import with_clusters
from safepoint.cli.interruption import undoing
from safepoint.cli.output import print_answer, table
from safepoint.cli.place import Connection, ConnectionOrSecret
from safepoint.errors import ImageError, NothingValidError, StorageError, UsageError, printable
from safepoint.foundation import clock
from safepoint.foundation.units import format_age, format_bytes, plural

if TYPE_CHECKING:
    from safepoint.transparent.images.location import ImageLocation
from safepoint.cli.commands.images.common import (
    Json,
    KeyOption,
    Place,
    ReadImage,
    ReadImages,
    ReadPlace,
    document_of,
    key_facts,
    location_only,
    opened,
    page_progress,
)

app = typer.Typer(
    name="images",
    help="List, show, check, copy and delete process images.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("list")
@with_clusters
def list_(
    location: ReadPlace, key: KeyOption = None, connection: ConnectionOrSecret = None, as_json: Json = False
) -> None:
    """List the images of a location, newest first."""
    with opened(location_only(location), key) as (images, _):
        documents, rows = _listed(images)
    lines = table(["IMAGE", "AGE", "PROGRAM", "SIZE", "MEMORY", "KEY", "STATE"], rows)
    print_answer(as_json, documents, lines if rows else [f"no process images in {location}"])


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
        documents.append({**document_of(manifest, location), "fault": str(faults[0]) if faults else None})
        rows.append(
            [
                name,
                format_age(clock.wall_s() - clock.parse_utc(manifest.created)),
                manifest.parts[0].program,
                format_bytes(manifest.size_bytes),
                format_bytes(raw_bytes(manifest)),
                key_facts(manifest, location)[1],
                "damaged" if faults else "complete",
            ]
        )
    return documents, rows


@app.command()
@with_clusters
def show(
    location: ReadImage, key: KeyOption = None, connection: ConnectionOrSecret = None, as_json: Json = False
) -> None:
    """Show what an image holds, and which other images it needs."""
    with opened(location, key) as (images, found):
        manifest = images.read(found or images.newest())
    from safepoint.transparent.images.materialise import raw_bytes

    document = {**document_of(manifest, images), "manifest": json.loads(manifest.to_bytes())}
    num_pages, num_stored = manifest.num_pages, manifest.num_stored
    num_zero = sum(one.num_zero for one in manifest.page_files)
    lines = [
        f"{images.where(manifest.name)}: {printable(manifest.parts[0].program)}, of {manifest.created}",
        *(
            f"  part {number}: {printable(part.program)}, process {part.root_pid}, "
            f"{plural(part.num_processes, 'process')}"
            for number, part in enumerate(manifest.parts)
        ),
        f"  machine: {manifest.machine.architecture}, Linux {manifest.machine.kernel}, CRIU {manifest.machine.criu}"
        f"{', ' + plural(len(manifest.machine.gpus), 'GPU') if manifest.machine.gpus else ''}",
        f"  pages: {num_pages}, of which {num_zero} zero, {num_pages - num_zero - num_stored} in older images, "
        f"{num_stored} in this image",
        f"  size: {format_bytes(manifest.size_bytes)} for {format_bytes(raw_bytes(manifest))} of memory",
        f"  needs: {', '.join(source.name for source in manifest.sources) or 'no other image'}",
        f"  key: {key_facts(manifest, images)[1]}",
    ]
    print_answer(as_json, document, lines)


@app.command()
@with_clusters
def verify(
    location: ReadImages,
    as_json: Json = False,
    deep: Annotated[bool, typer.Option("--deep", help="Read every page and compare its digest.")] = False,
    key: KeyOption = None,
    connection: ConnectionOrSecret = None,
) -> None:
    """Check one image, or all images of a location.

    Without --deep, only the manifests, the tables of pages and the sizes of files are checked. With the key of an
    image, the command detects every change in the checked parts, even a change that was made on purpose. An encrypted
    image cannot be checked without its key. Exit code 14: an image is damaged, or there is no image.
    """
    documents: list[dict[str, Any]] = []
    lines: list[str] = []
    with opened(location, key) as (images, found):
        from safepoint.transparent.images.materialise import verify as verify_image

        names = [found] if found else images.names()
        if not names:
            raise NothingValidError(f"there is no process image in {location}")
        for name in names:
            fault = None
            try:
                verify_image(images, name, deep=deep)
            except ImageError as error:
                fault = error.message
            documents.append({"name": name, "path": images.where(name), "is_deep": deep, "fault": fault})
            lines.append(f"{name}: {'cannot be restored' if fault else 'valid' if deep else 'complete'}")
            lines += [f"  {fault}"] if fault else []
    print_answer(as_json, documents, lines)
    num_damaged = sum(document["fault"] is not None for document in documents)
    if num_damaged:
        raise ImageError(
            f"{num_damaged} of {plural(len(names), 'image')} in {images.where()} cannot be restored",
            hint="see the faults above; an image also needs the images that `safepoint images show` names",
        )


@app.command()
def prune(
    place: Place,
    keep: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="Which images to keep. One or more policies, separated by commas: newest=N, every=N (the images "
            "whose number is a multiple of N), younger=2h.",
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    key: KeyOption = None,
    connection: Connection = None,
    as_json: Json = False,
) -> None:
    """Delete the images that --keep does not select, and that no kept image needs.

    These images always stay: the newest one, the newest valid one, damaged ones, and all images that one of these
    needs. In a folder, images that are being read also stay. In an object store, the command may delete an image
    while another process reads it. Images that were made with another key than yours, or than the key in --key, also
    stay. Images without protection are counted apart from images with the key: `newest=2` keeps two of each kind.
    Exit code
    11: an image is being written to the location. Exit code 13: an image could not be deleted.
    """
    try:
        policies = parse_policies(keep)
    except ValueError as error:
        raise UsageError(f"--keep: {error}") from error
    if any(isinstance(policy, KeepBest) for policy in policies):
        raise UsageError("--keep: an image has no metrics", hint="use newest=N, every=N and younger=2h")
    if not any(policy.is_limit for policy in policies):
        raise UsageError(f"--keep {keep!r} would delete nothing", hint="add newest=N or every=N")
    with opened(location_only(place), key) as (location, _):
        from safepoint.transparent.images.pruning import prune as prune_images

        found = prune_images(location, policies, is_dry_run=dry_run)
    document = {
        "deleted": [{"name": one.name, "size_bytes": one.size_bytes} for one in found.deleted],
        "needed": list(found.needed),
        "unreadable": list(found.unreadable),
        "of_other_keys": list(found.of_other_keys),
        "failed": [{"name": name, "reason": reason} for name, reason in found.failed],
        "is_dry_run": dry_run,
    }
    word = "would be deleted" if dry_run else "deleted"
    lines = [f"{location.where(one.name)}: {word} ({format_bytes(one.size_bytes)})" for one in found.deleted]
    need = "may need" if found.unreadable else "needs"
    lines += [f"{name} stays, because a kept image {need} it" for name in found.needed]
    lines += [f"{name} cannot be read: it may need all older images, so they stay" for name in found.unreadable]
    others = found.of_other_keys
    lines += [f"{name} states another key than yours, and stays: name its key with --key" for name in others]
    print_answer(as_json, document, lines or ["nothing to delete"])
    for name, reason in found.failed:
        raise StorageError(
            f"{location.where(name)} cannot be deleted ({reason}); it stays, and the older images stay because it "
            "may need them",
            hint="fix the owner or the attributes of the folder, then run the command again",
        )


@app.command("copy")
def copy(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="An image, such as images/image-3; or a location of images, for all complete images in it.",
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="The location to copy to. Images keep their names.")],
    connection: Connection = None,
    as_json: Json = False,
) -> None:
    """Copy images to a folder or an object store, with all images that they need, and compare every byte.

    No key is needed: encrypted images stay encrypted. If DST already has an image, that image is not copied again.
    After SIGTERM or Ctrl-C, an image that was not copied completely is deleted; a second signal ends the command at
    once. Exit code 11: DST has another image of the same name, and nothing was copied.
    """
    documents: list[dict[str, Any]] = []
    lines: list[str] = []
    with (
        undoing(
            "an image that was not copied completely is deleted; images that were copied before stay",
            left="files of an image that was not copied completely may stay in DST, and are no image; the next "
            "`safepoint images copy` or `prune` deletes them, in an object store after a day",
            as_json=as_json,
        ),
        opened(source) as (location, name),
        opened(location_only(target), may_be_new=True) as (to, _),
    ):
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
                copy_image(location, one, to, progress=page_progress(f"copying {one.name}", one.size_bytes))
            origin, where = location.where(one.name), to.where(one.name)
            documents.append({"name": one.name, "from": origin, "to": where, "copied": is_new})
            lines.append(
                f"{origin} {'copied to' if is_new else 'exists already as'} {where} ({format_bytes(one.size_bytes)})"
            )
    print_answer(as_json, documents, lines)


def _complete(location: "ImageLocation") -> list[str]:
    """The names of the complete images.

    An image is complete if its manifest and its files exist, and if the manifests and files of all images that it
    needs also exist.
    """
    found: list[str] = []
    for name in location.names():
        with contextlib.suppress(ImageError):
            if not any(location.faults(one) for one in location.chain(location.read(name))):
                found.append(name)
    return found
