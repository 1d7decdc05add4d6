"""How the commands about checkpoints show them: lines for a person, values for JSON."""

from collections.abc import Sequence
from typing import Any, cast

from safepoint.checkpoint.format.verify import Fault
from safepoint.checkpoint.tools.difference import Change
from safepoint.checkpoint.tools.inventory import Item, Kind
from safepoint.errors import printable
from safepoint.foundation.events.console import ProgressLine

OURS = (Kind.CHECKPOINT, Kind.PART)
"""The kinds that a run has written as checkpoints."""


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
