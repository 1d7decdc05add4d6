"""The receipt of a suspension: which checkpoint was saved, where, and what was checked.

This module sends no requests.
"""

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from typing import Any, cast

from safepoint.jobs.cluster.objects import at
from safepoint.jobs.cluster.spec import DOMAIN

RECEIPT = f"{DOMAIN}/receipt"
"""The annotation of a suspended TrainJob with its receipt."""
_MOST_BYTES = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What the suspension of a job has saved.

    Args:
        step: the step of the checkpoint.
        checkpoint: its location.
        digest: the digest of its manifest, which has the digests of all its files.
        is_read: whether all its files were read and compared with their digests; otherwise only their names and
            sizes were compared.
        was_requested: whether the save was requested before the job was suspended; otherwise the pods saved when they
            received SIGTERM.
        reason: why the pods saved at SIGTERM; empty if the save was requested before.
    """

    step: int
    checkpoint: str
    digest: str
    is_read: bool
    was_requested: bool
    reason: str = ""

    @property
    def text(self) -> str:
        """The receipt in a few words, for a person."""
        how = "before the pods ended" if self.was_requested else f"at SIGTERM because {self.reason}"
        only = "only the names and sizes of its files were compared"
        checked = "every file was read and matches its digest" if self.is_read else only
        return f"step {self.step} was saved in {self.checkpoint} (digest {self.digest}) {how}; {checked}"

    def to_document(self) -> dict[str, Any]:
        """The receipt as JSON values."""
        return dataclasses.asdict(self)


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
