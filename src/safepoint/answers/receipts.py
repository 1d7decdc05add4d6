"""Makes the receipt of a suspension from the checkpoint of a job of this machine, and puts any receipt into words."""

import json
from collections.abc import Mapping
from typing import Any

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.errors import SafepointError
from safepoint.jobs.local.outputs import open_output
from safepoint.jobs.model.receipts import Receipt
from safepoint.jobs.model.records import JobRecord


def receipt_of(job: JobRecord, output: str | None) -> Receipt | None:
    """The checkpoint that a suspension has saved, with the digest of its manifest; None if there is no complete
    checkpoint, or if the checkpoint cannot be read.

    The names and sizes of the files are compared with the manifest; the contents of the files are not read.
    """
    if output is None or job.safe_step is None:
        return None
    try:
        inventory = open_output(job.spec, output)
        item = inventory.item(checkpoint_name(job.safe_step))
        if not item.is_complete:
            return None
        record = json.loads(inventory.read_manifest(item).to_bytes())
    except SafepointError:
        return None
    return Receipt(
        step=job.safe_step,
        checkpoint=item.where,
        digest=str(record["manifest_digest"]),
        is_read=False,
        was_requested=False,
    )


def facts_of(receipt: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The names and values of a receipt, for a person.

    Args:
        receipt: the receipt, as JSON values.
    """
    checked = "every file was read and matches its digest" if receipt["is_read"] else "names and sizes of all files"
    how = "requested before the job was stopped" if receipt["was_requested"] else "at SIGTERM"
    return (
        ("Safe step", f"{receipt['step']:,}"),
        ("Checkpoint", str(receipt["checkpoint"])),
        ("Digest of its manifest", str(receipt["digest"])),
        ("Saved", how + (f", because {receipt['reason']}" if receipt["reason"] else "")),
        ("Checked", checked),
    )
