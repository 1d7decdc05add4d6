"""The receipt of a suspension, as a pod reports it and as an annotation keeps it.

This module sends no requests.
"""

import contextlib
import json
from typing import Any, cast

from safepoint.jobs.cluster.objects import at
from safepoint.jobs.cluster.spec import DOMAIN
from safepoint.jobs.model.receipts import Receipt

RECEIPT = f"{DOMAIN}/receipt"
"""The annotation of a suspended TrainJob with its receipt."""
_MOST_BYTES = 16 << 10


def receipt_of(document: Any, *, output: str | None, was_requested: bool, reason: str = "") -> Receipt | None:
    """The receipt for a checkpoint that a pod has checked; None if the pod's answer describes no checkpoint.

    Args:
        document: the pod's answer, see `CheckpointReceipt`.
        output: the output location of the job.
        was_requested: see `Receipt`.
        reason: see `Receipt`.
    """
    step, name, digest = at(document, "step"), at(document, "name"), at(document, "digest")
    if type(step) is not int or not isinstance(name, str) or not isinstance(digest, str):
        return None
    return Receipt(
        step=step,
        checkpoint=name if output is None else f"{output.rstrip('/')}/{name}",
        digest=digest,
        is_read=at(document, "is_read") is True,
        was_requested=was_requested,
        reason=reason,
    )


def read_receipt(text: str | None) -> Receipt | None:
    """The receipt in the text of an annotation; None if there is no text, or if the text is no receipt."""
    if text is None or len(text) > _MOST_BYTES:
        return None
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        document: Any = json.loads(text)
        receipt = Receipt(**cast("dict[str, Any]", document))
        kinds = {"step": int, "is_read": bool, "was_requested": bool}
        if all(type(value) is kinds.get(name, str) for name, value in receipt.to_document().items()):
            return receipt
    return None
