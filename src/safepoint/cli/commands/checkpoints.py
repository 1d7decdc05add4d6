"""`safepoint checkpoints …`: list, check, copy and prune checkpoints in a folder or an object store.

The result goes to stdout: lines, or one JSON document with `--json`. Progress goes to stderr.
"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.local.final_model import FINAL
from safepoint.checkpoint.local.retention import KeepBest, parse_policies
from safepoint.checkpoint.tools import adopt as adopting
from safepoint.checkpoint.tools import copy as copying
from safepoint.checkpoint.tools import export as exporting
from safepoint.checkpoint.tools.difference import compare
from safepoint.checkpoint.tools.documents import OURS, document_of, list_document, state_of, verify_document
from safepoint.checkpoint.tools.inventory import Kind
from safepoint.checkpoint.tools.removal import Removal, remove
from safepoint.checkpoint.tools.repair import repair
from safepoint.cli.checkpoint_answers import (
    Accumulation,
    adoption_answers,
    check_adopted,
    check_removed,
    hint_on_damage,
    nothing_to_adopt,
    nothing_to_verify,
    removal_answers,
    repair_answers,
    sentence_of,
    show_reading,
    stray_lines,
    text_of,
)
from safepoint.cli.claims.from_outside import with_clusters
from safepoint.cli.location_argument import CheckpointPlace, OutputPlace, location_of, open_place, pick
from safepoint.cli.output import print_answer, table
from safepoint.cli.place import ConnectionOrSecret, find_place
from safepoint.errors import CheckpointError, NothingValidError, PartlyDoneError, UsageError, printable
from safepoint.foundation import clock
from safepoint.foundation.events.console import ProgressLine
from safepoint.foundation.units import format_age, format_bytes, plural
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store

app = typer.Typer(
    name="checkpoints",
    help="List, check, copy and prune checkpoints in folders, object stores and claims.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_PLACE = (
    "A checkpoint or an output location: a folder, s3://bucket/prefix, pvc://claim/path, or job:NAME for the output "
    "location of a job."
)
_NEWEST = f"{_PLACE} An output location stands for the newest complete checkpoint in it."
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_Deep = Annotated[bool, typer.Option("--deep", help="Read every file and compare its digest.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what the command would change, but change nothing.")]


@app.command("list")
@with_clusters
def list_(
    location: CheckpointPlace, connection: ConnectionOrSecret = None, as_json: _Json = False, deep: _Deep = False
) -> None:
    """List the checkpoints of a location, newest first.

    For each checkpoint the list shows the age, the trigger (why the checkpoint was made), the size, the number of
    files, and the state, such as complete or damaged.
    """
    inventory, name = open_place(location)
    items = inventory.items() if name is None else [inventory.item(name)]
    rows: list[list[str]] = []
    documents: list[dict[str, Any]] = []
    for item in items:
        faults = inventory.verify(item, progress=ProgressLine(f"reading {item.name}").update) if deep else item.faults
        state = state_of(item, faults, deep=deep)
        documents.append(list_document(item, faults, deep=deep))
        rows.append(
            [
                item.name,
                format_age(clock.wall_s() - item.created_s),
                str(item.stated.trigger) if item.stated else "-",
                format_bytes(item.size_bytes),
                plural(item.num_files, "file"),
                state,
            ]
        )
    lines = table(["CHECKPOINT", "AGE", "TRIGGER", "SIZE", "FILES", "STATE"], rows)
    print_answer(as_json, documents, lines if rows else [f"no checkpoints in {inventory.store.location}"])


@app.command()
@with_clusters
def show(location: CheckpointPlace, connection: ConnectionOrSecret = None, as_json: _Json = False) -> None:
    """Show the manifest and the files of a checkpoint.

    If LOCATION is an output location, the command shows the newest complete checkpoint in it.
    """
    inventory, name = open_place(location)
    item = pick(inventory, name)
    document = document_of(item, item.faults)
    lines = [f"{item.where}: {state_of(item, item.faults, deep=False)}"]
    if item.stated is not None:
        manifest = inventory.read_manifest(item)
        record = json.loads(manifest.to_bytes())
        document["manifest"] = record
        lines += [
            f"  {field}: {printable(text_of(value))}"
            for field, value in record.items()
            if field not in {"files", "format", "manifest_digest"} and value != {}
        ]
        lines += table(
            ["  FILE", "SIZE", "DIGEST"],
            [[f"  {entry.path}", format_bytes(entry.size_bytes), entry.digest] for entry in manifest.files],
        )
    lines += [f"  fault: {fault}" for fault in item.faults] + stray_lines(item)
    print_answer(as_json, document, lines)


@app.command()
@with_clusters
def verify(
    location: CheckpointPlace, connection: ConnectionOrSecret = None, as_json: _Json = False, deep: _Deep = False
) -> None:
    """Check one checkpoint, or all checkpoints of a location.

    The command prints every fault. Without --deep, it compares only the names and sizes of files with the manifest. A
    checkpoint of another program has no manifest. If LOCATION names such a checkpoint, the command always reads its
    files, and checks them as far as their formats allow. If LOCATION is an output location, such checkpoints are not
    checked. Exit code 14: a checkpoint is damaged, or there is no checkpoint.
    """
    inventory, name = open_place(location)
    # A folder without a manifest is reported as damaged only if the user names this folder.
    everything = [inventory.item(name)] if name else inventory.items()
    items = [item for item in everything if name or item.kind in OURS]
    if not items:
        raise NothingValidError(nothing_to_verify(everything, inventory.store.location))
    documents: list[dict[str, Any]] = []
    lines: list[str] = []
    num_damaged = 0
    is_one_left = False
    for item in items:
        is_read, watch = deep or item.kind is Kind.FOREIGN, ProgressLine(f"reading {item.name}").update
        faults = inventory.verify(item, progress=watch) if is_read else item.faults
        num_damaged += bool(faults)
        is_one_left |= not faults and item.name != FINAL and not item.is_of_other_user
        documents.append(verify_document(item, faults))
        limit = "" if is_read or faults or item.is_of_other_user else "; contents were not read (--deep reads them)"
        lines.append(f"{item.where}: {state_of(item, faults, deep=deep)}{limit}")
        lines += [f"  {fault}" for fault in faults] + stray_lines(item)
    lines += [f"{item.where}: {item.kind}" for item in everything if item not in items]
    print_answer(as_json, documents, lines)
    if num_damaged:
        raise CheckpointError(
            f"{num_damaged} of {plural(len(items), 'checkpoint')} in {inventory.store.location} "
            f"{'is' if num_damaged == 1 else 'are'} damaged",
            hint=hint_on_damage(is_single=name is not None, is_one_left=is_one_left),
        )


@app.command()
@with_clusters
def adopt(
    location: CheckpointPlace,
    connection: ConnectionOrSecret = None,
    as_json: _Json = False,
    dry_run: _DryRun = False,
    accumulation: Accumulation = None,
) -> None:
    """Write manifests for checkpoints of other programs.

    From then on, Safepoint treats these checkpoints as its own: retention counts them, and may delete them. The
    command first reads and checks all files. A checkpoint with a fault is not adopted. Exit codes: 3 some checkpoints
    have faults; 11 a run uses the folder; 14 all checkpoints have faults.
    """
    inventory, name = open_place(location)
    others = [inventory.item(name)] if name else list(inventory.items())
    items = [item for item in others if item.kind is Kind.FOREIGN and (name or not item.is_of_other_user)]
    done = adopting.adopt(inventory, items, accumulation=accumulation, dry_run=dry_run, progress=show_reading)
    documents, lines = adoption_answers(done, dry_run=dry_run)
    print_answer(as_json, documents, lines or [nothing_to_adopt(others, location)])
    check_adopted(done, location)


@app.command()
@with_clusters
def prune(
    location: OutputPlace,
    keep: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="Which checkpoints to keep. One or more policies, separated by commas: newest=N, every=STEPS, "
            "best=N:METRIC[:max], younger=2h.",
        ),
    ],
    connection: ConnectionOrSecret = None,
    as_json: _Json = False,
    dry_run: _DryRun = False,
) -> None:
    """Delete the checkpoints that --keep does not select.

    These checkpoints always stay: the newest one, the newest valid one, and those that `safepoint checkpoints list`
    shows as damaged. In a folder, checkpoints that are being read or uploaded also stay. In an object store, the
    command may delete a checkpoint while another process reads it. Before the command deletes anything, it reads
    checkpoints, newest first, until it has found a valid one. Exit code 13: at least one checkpoint could not be
    deleted; the others were deleted.
    """
    inventory, name = open_place(location)
    if name is not None:
        raise UsageError(
            f"{location} is a single checkpoint, and this command needs an output location",
            hint="give the location that contains this checkpoint",
        )
    try:
        policies = parse_policies(keep)
    except ValueError as error:
        raise UsageError(f"--keep: {error}") from error
    if not any(policy.is_limit for policy in policies):
        raise UsageError(f"--keep {keep!r} would delete nothing", hint="add newest=N, every=STEPS or best=N:METRIC")
    known = {metric for item in inventory.items() if item.stated is not None for metric in item.stated.metrics}
    for policy in policies:
        if isinstance(policy, KeepBest) and policy.metric not in known:
            there = f"the metrics are {', '.join(sorted(known))}" if known else "no checkpoint has a metric"
            raise UsageError(
                f"--keep {keep!r}: no checkpoint has the metric {policy.metric!r}; nothing was deleted", hint=there
            )
    doomed = inventory.superseded(policies, progress=show_reading)
    found = Removal(deleted=tuple(doomed)) if dry_run else remove(inventory, doomed)
    print_answer(as_json, *removal_answers(found, dry_run=dry_run))
    is_folder = inventory.folder is not None
    check_removed(found.failed, location, num_removed=len(found.deleted), is_folder=is_folder)


@app.command("copy")
@with_clusters
def copy(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            callback=find_place,
            help=f"{_PLACE} From an output location, all complete checkpoints are copied.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="The output location to copy to: a folder, s3://bucket/prefix or pvc://claim/path. Checkpoints keep "
            "their names.",
        ),
    ],
    connection: ConnectionOrSecret = None,
    as_json: _Json = False,
) -> None:
    """Copy one checkpoint, or all complete ones, and verify every byte.

    SRC and DST may be folders, object stores and claims.
    """
    inventory, name = open_place(source)
    place = _place_around(target, name)
    items = [inventory.item(name)] if name else [item for item in inventory.items() if item.counts]
    if not items:
        raise NothingValidError(f"{inventory.store.location} holds no complete checkpoint; nothing was copied")
    for item in items:  # check all items, so that an error is raised before any copy begins
        copying.is_there(inventory, item, place)
    documents: list[dict[str, Any]] = []
    lines: list[str] = []
    num_damaged = 0
    for item in reversed(items):  # oldest first: if the command is interrupted, only the newest are missing
        where = str(place.child(item.name))
        document: dict[str, Any] = {"name": item.name, "from": item.where, "to": where}
        try:
            is_new = copying.copy(inventory, item, place, progress=ProgressLine(f"copying {item.name}").update)
        except CheckpointError as error:
            num_damaged += 1
            documents.append({**document, "copied": False, "error": error.message})
            lines.append(f"{item.where} was not copied: {error.message}")
            continue
        documents.append({**document, "copied": is_new})
        did = "copied to" if is_new else "exists already as"
        lines.append(f"{item.where} {did} {where} ({format_bytes(item.size_bytes)})")
    print_answer(as_json, documents, lines)
    if num_damaged:
        kind = CheckpointError if num_damaged == len(items) else PartlyDoneError
        raise kind(
            f"{num_damaged} of {plural(len(items), 'checkpoint')} could not be copied, because they are damaged",
            hint="`safepoint checkpoints verify` lists the faults",
        )


@app.command()
@with_clusters
def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            callback=find_place,
            help=f"{_PLACE} From an output location, the command exports the final model; if there is none, the "
            "newest complete checkpoint.",
        ),
    ],
    target: Annotated[
        str, typer.Argument(metavar="DST", help="A new or empty folder, s3://bucket/prefix or pvc://claim/path.")
    ],
    connection: ConnectionOrSecret = None,
    with_code: Annotated[
        bool,
        typer.Option(
            "--with-code",
            help="Also export Python code. Programs that load the export may run the code: export only code that "
            "you trust.",
        ),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Write a checkpoint's model in the format that `from_pretrained` reads.

    SRC may also be a folder that torch.distributed.checkpoint or DeepSpeed ZeRO wrote without Safepoint. If SRC and
    DST are in object stores, nothing is written to a disk of this machine.
    """
    place, progress = _place(target), ProgressLine("exporting").update
    location = _sharded_model(source)
    if location is not None:
        where, store = str(location), open_store(location)
        paths = exporting.export_pieces(store, "", place, with_code=with_code, progress=progress)
    else:
        inventory, name = open_place(source)
        finals = [item for item in inventory.items() if item.name == "final" and item.counts]
        item = finals[0] if finals and name is None else pick(inventory, name)
        where = item.where
        paths = exporting.export_item(inventory, item, place, with_code=with_code, progress=progress)
    document = {"from": where, "to": str(place), "files": paths}
    lines = [f"exported {where} to {place}:", *(f"  {path}" for path in paths)]
    if not any(path.endswith("config.json") for path in paths):
        lines.append(
            "weights only: without a config.json, from_pretrained cannot build the model; a script has to build it"
        )
    print_answer(as_json, document, lines)


@app.command()
@with_clusters
def diff(
    before: Annotated[str, typer.Argument(metavar="A", callback=find_place, help=_NEWEST)],
    after: Annotated[str, typer.Argument(metavar="B", callback=find_place, help=_NEWEST)],
    connection: ConnectionOrSecret = None,
    as_json: _Json = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also compare the tensors.")] = False,
) -> None:
    """Print what changed from checkpoint A to checkpoint B.

    The command compares the settings and the files; with --deep, also the tensors.
    """
    places = [open_place(text) for text in (before, after)]
    old, new = ((inventory, pick(inventory, name)) for inventory, name in places)
    found = compare(old, new, deep=deep, progress=ProgressLine("comparing").update)
    document = {"before": old[1].where, "after": new[1].where, **dataclasses.asdict(found)}
    lines = [f"from {old[1].where}", f"to   {new[1].where}"]
    for title, changes in (("settings", found.settings), ("files", found.files), ("tensors", found.tensors)):
        lines.append(f"{title}: {plural(len(changes), 'change')}" if changes else f"{title}: the same")
        lines += [f"  {sentence_of(change)}" for change in changes]
    if not deep and any(change.name.endswith(".safetensors") for change in found.files):
        lines.append("tensors were not compared; use --deep")
    print_answer(as_json, document, lines)


@app.command("repair")
@with_clusters
def repair_(
    location: OutputPlace,
    connection: ConnectionOrSecret = None,
    as_json: _Json = False,
    deep: _Deep = False,
    dry_run: _DryRun = False,
    drop_damaged: Annotated[
        bool,
        typer.Option(
            "--drop-damaged",
            help="Also remove damaged checkpoints. In a folder they are moved aside; in an object store they are "
            "deleted.",
        ),
    ] = False,
    idle: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="In an object store, keep unfinished checkpoints and uploads that are younger than SECONDS.",
        ),
    ] = 3600,
) -> None:
    """Remove unfinished checkpoints, and report damaged ones.

    Exit codes: 11 a run uses the folder, and nothing was changed; 13 a checkpoint cannot be removed; 14 there are
    damaged checkpoints, and they were not removed.
    """
    inventory, name = open_place(location)
    if name is not None:
        raise UsageError(
            f"{location} is a single checkpoint, and this command needs an output location",
            hint="give the location that contains it",
        )
    found = repair(
        inventory, deep=deep, drop_damaged=drop_damaged, dry_run=dry_run, idle_s=idle, progress=show_reading
    )
    is_gone = drop_damaged and not dry_run
    print_answer(as_json, *repair_answers(found, drop_damaged=drop_damaged, dry_run=dry_run))
    left = [item.where for item, _ in found.failed]
    num_removed = len(found.unfinished) + sum(is_gone and item.where not in left for item in found.damaged)
    check_removed(found.failed, location, num_removed=num_removed, is_folder=inventory.folder is not None)
    if found.damaged and not is_gone:
        raise CheckpointError(
            f"{plural(len(found.damaged), 'checkpoint')} in {location} "
            f"{'is' if len(found.damaged) == 1 else 'are'} damaged and not removed",
            hint="leave out --dry-run to remove them" if drop_damaged else "--drop-damaged removes them",
        )


def _place_around(text: str, name: str | None) -> Location:
    """The output location to copy to. The argument may also end with the name of the copied checkpoint."""
    place = _place(text)
    if step_of(Path(place.name)) is None:
        return place
    if place.name != name:
        raise UsageError(
            f"{text} ends with the name of another checkpoint, but a copy keeps the name of the original",
            hint="give the output location to copy to",
        )
    return place.parent


def _sharded_model(text: str) -> Location | None:
    """The location if it contains a sharded model; None if not, and for a checkpoint in an object store."""
    location = location_of(text)
    if location.is_folder:
        return location if exporting.is_in_pieces(open_store(location)) else None
    inventory, name = open_place(text)
    return location if name is None and exporting.is_in_pieces(inventory.store) else None


def _place(text: str) -> Location:
    location = location_of(text)
    copying.check_outside(location)
    return location
