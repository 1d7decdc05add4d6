"""The output of the commands about checkpoints: lines for a person, and values for JSON."""

from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from safepoint.checkpoint.tools.adopt import Adoption
from safepoint.checkpoint.tools.difference import Change
from safepoint.checkpoint.tools.documents import fault_documents
from safepoint.checkpoint.tools.inventory import Item, Kind
from safepoint.checkpoint.tools.removal import Removal
from safepoint.checkpoint.tools.repair import NOT_OURS, Repair
from safepoint.errors import CheckpointError, PartlyDoneError, StorageError, printable
from safepoint.foundation.events.console import ProgressLine
from safepoint.foundation.units import format_bytes, plural

Accumulation = Annotated[
    int | None,
    typer.Option(
        "--gradient-accumulation",
        metavar="N",
        min=1,
        help="Micro-batches per optimizer step and rank, for checkpoints whose files do not state this number.",
    ),
]


def adoption_answers(found: Sequence[Adoption], *, dry_run: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """What `adopt` has done, or would do: one JSON object for each checkpoint, and the lines to print."""
    documents: list[dict[str, Any]] = []
    lines: list[str] = []
    did = "would adopt" if dry_run else "adopted"
    for one in found:
        faults = fault_documents(one.faults)
        documents.append({"name": one.item.name, "where": one.item.where, "adopted": not faults, "faults": faults})
        lines.append(f"{one.item.where} was not adopted:" if faults else f"{did} {one.item.where}")
        lines += [f"  {fault}" for fault in one.faults]
    return documents, lines


def hint_on_damage(*, is_single: bool, is_one_left: bool) -> str:
    """What to do about the damaged checkpoints that `verify` has found.

    Args:
        is_single: whether `verify` has checked only the checkpoint that the user named.
        is_one_left: whether a resume can use one of the checked checkpoints.
    """
    if is_single:
        return (
            "see the faults above; other checkpoints were not checked: give the output location to check all of them"
        )
    if is_one_left:
        return "see the faults above; a resume uses the newest valid checkpoint"
    return "no valid checkpoint is left: restore one from a backup, or start a new run in another location"


def nothing_to_verify(items: Sequence[Item], location: object) -> str:
    """Why `verify` has found no checkpoint to check at a location.

    Args:
        items: what is at the location. Nothing in `items` is a checkpoint of Safepoint, or a part of one.
        location: the location.
    """
    foreign = sum(item.kind is Kind.FOREIGN for item in items)
    unfinished = sum(item.kind is Kind.UNFINISHED for item in items)
    others = [f"{plural(foreign, 'checkpoint')} of another program"] if foreign else []
    others += [plural(unfinished, "unfinished checkpoint")] if unfinished else []
    if not others:
        return f"there is no checkpoint in {location}"
    return f"there is no complete checkpoint of Safepoint in {location}, only {' and '.join(others)}"


def nothing_to_adopt(items: Sequence[Item], location: str) -> str:
    """Why `adopt` has found no checkpoint to adopt.

    Args:
        items: the checkpoints at the location. `adopt` has found no foreign checkpoint of this user among them, so
            all foreign checkpoints in `items` belong to other users.
        location: the location, as the user gave it.
    """
    of_others = sum(item.kind is Kind.FOREIGN for item in items)
    unfinished = sum(item.kind is Kind.UNFINISHED for item in items)
    reasons = [f"{plural(of_others, 'checkpoint')} of another user"] if of_others else []
    reasons += [plural(unfinished, "unfinished checkpoint")] if unfinished else []
    if reasons:
        return f"nothing to adopt in {location}: {', '.join(reasons)}, which cannot be adopted"
    why = "every checkpoint has a manifest" if items else "there is no checkpoint"
    return f"nothing to adopt in {location}: {why}"


def check_adopted(found: Sequence[Adoption], location: str) -> None:
    """Raise an error if a checkpoint was not adopted."""
    num_faulty = sum(bool(one.faults) for one in found)
    if num_faulty:
        kind = CheckpointError if num_faulty == len(found) else PartlyDoneError
        raise kind(f"{num_faulty} of {plural(len(found), 'checkpoint')} in {location} cannot be adopted, see above")


def removal_answers(found: Removal, *, dry_run: bool) -> tuple[dict[str, Any], list[str]]:
    """What `prune` has deleted, or would delete: as a JSON object, and as the lines to print."""
    gone = found.deleted
    size_bytes = sum(item.size_bytes for item in gone)
    document = {
        "deleted": [item.where for item in gone],
        "bytes": size_bytes,
        "dry_run": dry_run,
        "failed": _failures(found.failed),
    }
    did = "would delete" if dry_run else "deleted"
    lines = [f"{did} {item.where} ({format_bytes(item.size_bytes)})" for item in gone]
    lines += [f"kept {item.where}: it cannot be deleted: {printable(reason)}" for item, reason in found.failed]
    lines.append(f"{did} {plural(len(gone), 'checkpoint')}, {format_bytes(size_bytes)}")
    return document, lines


def repair_answers(found: Repair, *, drop_damaged: bool, dry_run: bool) -> tuple[dict[str, Any], list[str]]:
    """What `repair` has found and done: as a JSON object, and as the lines to print."""
    document = {
        "dropped": [item.where for item in found.unfinished],
        "recent": [item.where for item in found.recent],
        "foreign": [item.where for item in found.foreign],
        "newer": [item.where for item in found.newer],
        "strays": list(found.strays),
        "damaged": [{"where": item.where, "faults": fault_documents(item.faults)} for item in found.damaged],
        "moved_to": found.moved_to,
        "leftovers": found.num_leftovers,
        "dry_run": dry_run,
        "failed": _failures(found.failed),
    }
    did = "would drop" if dry_run else "dropped"
    lines = [f"{did} {item.where}: it was not committed" for item in found.unfinished]
    lines += [f"kept {item.where}: it is unfinished, and a run may be writing it" for item in found.recent]
    lines += [f"kept {item.where}: Safepoint did not write it" for item in found.foreign]
    lines += [f"kept {item.where}: a later release wrote it" for item in found.newer]
    lines += [f"kept {printable(path)}: it is not in the manifest" for path in found.strays]
    fate = f"moved to {found.moved_to}" if found.moved_to else "deleted"
    if dry_run or not drop_damaged:
        fate = "would be removed" if drop_damaged else "kept; --drop-damaged removes it"
    reasons = {item.where: reason for item, reason in found.failed}
    for item in found.damaged:
        reason = reasons.pop(item.where, None)
        how = fate if reason is None else f"kept, because it cannot be removed: {printable(reason)}"
        lines.append(f"{item.where} is damaged ({how}):")
        lines += [f"  {fault}" for fault in item.faults]
    lines += [f"kept {where}: it cannot be removed: {printable(reason)}" for where, reason in reasons.items()]
    if found.num_leftovers:
        lines.append(f"deleted {plural(found.num_leftovers, 'leftover')} of ended runs")
    return document, lines or ["nothing to repair"]


def check_removed(failed: Sequence[tuple[Item, str]], location: str, *, num_removed: int, is_folder: bool) -> None:
    """Raise an error if a checkpoint could not be removed.

    Args:
        failed: the checkpoints that could not be removed, each with the reason.
        location: the location, as the user gave it.
        num_removed: the number of checkpoints that were removed.
        is_folder: whether the location is a folder, and not an object store.
    """
    if not failed:
        return
    item, reason = failed[0]
    hint = "fix the folder's owner or attributes (`lsattr -d`), or unmount it, and run the command again"
    if reason == NOT_OURS:
        hint = "if you do not need its objects, delete them with the tools of the store"
    elif not is_folder:
        hint = (
            "check that your keys have the right to delete objects, and that no object lock of the store protects "
            "these objects; then run the command again"
        )
    fate = f"; {plural(num_removed, 'other checkpoint')} {'was' if num_removed == 1 else 'were'} removed"
    raise StorageError(
        f"{plural(len(failed), 'checkpoint')} in {location} could not be removed, such as {item.name} "
        f"({printable(reason)}){fate if num_removed else ''}",
        hint=hint,
    )


def _failures(failed: Sequence[tuple[Item, str]]) -> list[dict[str, str]]:
    return [{"where": item.where, "reason": reason} for item, reason in failed]


def stray_lines(item: Item) -> list[str]:
    """A line for each file that the manifest does not name."""
    return [f"  {printable(path)}: it is not in the manifest, and is ignored" for path in item.strays]


def show_reading(checkpoint: str, done_bytes: int, total_bytes: int) -> None:
    """Show on a terminal how much of a checkpoint has been read."""
    ProgressLine(f"reading {checkpoint}").update(done_bytes, total_bytes)


def sentence_of(change: Change) -> str:
    """A difference between two checkpoints, as a line of text."""
    name, before, after = printable(change.name), printable(change.before), printable(change.after)
    if not before:
        return f"+ {name}: {after}"
    if not after:
        return f"- {name}: {before}"
    return f"{name}: {before} -> {after}" if before != after else f"{name}: {before}, other content"


def text_of(value: Any) -> str:
    """A value of a manifest as text."""
    if not isinstance(value, dict):
        return str(value)
    items = cast("dict[str, Any]", value).items()
    return ", ".join(f"{name} {item}" for name, item in items if item != "")
