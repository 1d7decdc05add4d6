"""A checkpoint as a JSON document, and its state in a word, for commands and pages."""

from collections.abc import Sequence
from typing import Any

from safepoint.checkpoint.format.verify import Fault
from safepoint.checkpoint.tools.inventory import Item, Kind

OURS = (Kind.CHECKPOINT, Kind.PART)
"""The kinds that runs of Safepoint write: checkpoints, and one node's part of a checkpoint."""


def state_of(item: Item, faults: Sequence[Fault], *, deep: bool) -> str:
    """The state of a checkpoint, such as `complete` or `damaged`.

    For other folders, the state is their kind, such as `part`; but the state of a part with faults is `damaged`.
    """
    if item.kind is not Kind.CHECKPOINT and (item.kind not in OURS or not faults):
        return item.kind
    if faults:
        return "damaged"
    if item.is_of_other_user:
        return "other user"
    return "verified" if deep else "complete"


def document_of(item: Item, faults: Sequence[Fault]) -> dict[str, Any]:
    """A checkpoint as JSON."""
    stated = item.stated
    return {
        "name": item.name,
        "where": item.where,
        "step": stated.step if stated else None,
        "created": stated.created if stated else None,
        "created_s": item.created_s,
        "trigger": str(stated.trigger) if stated else None,
        "kind": item.kind,
        "files": item.num_files,
        "bytes": item.size_bytes,
        "faults": fault_documents(faults),
        "strays": list(item.strays),
    }


def fault_documents(faults: Sequence[Fault]) -> list[dict[str, str]]:
    """Faults as JSON."""
    return [{"file": fault.file, "reason": fault.reason} for fault in faults]


def list_document(item: Item, faults: Sequence[Fault], *, deep: bool) -> dict[str, Any]:
    """A checkpoint in a list, as JSON, with its state."""
    return {**document_of(item, faults), "state": state_of(item, faults, deep=deep)}


def verify_document(item: Item, faults: Sequence[Fault]) -> dict[str, Any]:
    """A checkpoint that was checked, as JSON."""
    return {**document_of(item, faults), "valid": not faults}
