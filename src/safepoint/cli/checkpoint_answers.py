"""Shows checkpoints, for the commands about checkpoints: lines for a person, values for JSON."""

from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from safepoint.checkpoint.format.verify import Fault
from safepoint.checkpoint.tools.adopt import Adoption
from safepoint.checkpoint.tools.difference import Change
from safepoint.checkpoint.tools.inventory import Item, Kind
from safepoint.errors import CheckpointError, PartlyDoneError, printable
from safepoint.foundation.events.console import ProgressLine
from safepoint.foundation.units import plural

Accumulation = Annotated[
    int | None,
    typer.Option(
        "--gradient-accumulation",
        metavar="N",
        min=1,
        help="Micro-batches per optimizer step and rank, for checkpoints whose files do not state this number.",
    ),
]
OURS = (Kind.CHECKPOINT, Kind.PART)
"""The kinds that runs of Safepoint write: checkpoints, and one node's part of a checkpoint."""


def state_of(item: Item, faults: Sequence[Fault], *, deep: bool) -> str:
    """The state of a checkpoint, as a list shows it."""
    if item.kind is not Kind.CHECKPOINT and (item.kind not in OURS or not faults):
        return item.kind
    if faults:
        return "damaged"
    return "verified" if deep else "complete"


def document_of(item: Item, faults: Sequence[Fault]) -> dict[str, Any]:
    """A checkpoint as JSON."""
    manifest = item.manifest
    return {
        "name": item.name,
        "where": item.where,
        "step": manifest.step if manifest else None,
        "created": manifest.created if manifest else None,
        "created_s": item.created_s,
        "trigger": str(manifest.trigger) if manifest else None,
        "kind": item.kind,
        "files": item.num_files,
        "bytes": item.size_bytes,
        "faults": fault_documents(faults),
        "strays": list(item.strays),
    }


def adoption_answers(found: Sequence[Adoption], *, dry_run: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """What `adopt` has done, as JSON and as lines."""
    documents: list[dict[str, Any]] = []
    lines: list[str] = []
    did = "would adopt" if dry_run else "adopted"
    for one in found:
        faults = fault_documents(one.faults)
        documents.append({"name": one.item.name, "where": one.item.where, "adopted": not faults, "faults": faults})
        lines.append(f"{one.item.where} was not adopted:" if faults else f"{did} {one.item.where}")
        lines += [f"  {fault}" for fault in one.faults]
    return documents, lines


def check_adopted(found: Sequence[Adoption], location: str) -> None:
    """Raise an error if a checkpoint was not adopted."""
    num_faulty = sum(bool(one.faults) for one in found)
    if num_faulty:
        kind = CheckpointError if num_faulty == len(found) else PartlyDoneError
        raise kind(f"{num_faulty} of {plural(len(found), 'checkpoint')} in {location} cannot be adopted, see above")


def stray_lines(item: Item) -> list[str]:
    """A line for each file that the manifest does not name."""
    return [f"  {printable(path)}: it is not in the manifest, and is ignored" for path in item.strays]


def show_reading(checkpoint: str, done_bytes: int, total_bytes: int) -> None:
    """Show on a terminal how much of a checkpoint has been read."""
    ProgressLine(f"reading {checkpoint}").update(done_bytes, total_bytes)


def fault_documents(faults: Sequence[Fault]) -> list[dict[str, str]]:
    """Faults as JSON."""
    return [{"file": fault.file, "reason": fault.reason} for fault in faults]


def sentence_of(change: Change) -> str:
    """A change as a line."""
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
