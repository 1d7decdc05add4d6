"""The receipt of a suspension: which checkpoint was saved, where, and what was checked."""

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What the suspension of a job has saved.

    Args:
        step: the step of the checkpoint.
        checkpoint: its location.
        digest: the digest of its manifest, which has the digests of all its files.
        is_read: whether all its files were read and compared with their digests; otherwise only their names and
            sizes were compared.
        was_requested: whether the save was requested before the job was suspended, as on a cluster; otherwise the
            ranks saved when they received SIGTERM.
        reason: why the pods of a cluster saved at SIGTERM; empty if the save was requested before, and for a job of
            this machine.
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
        how = "before the pods ended" if self.was_requested else "at SIGTERM"
        how += f" because {self.reason}" if self.reason else ""
        only = "only the names and sizes of its files were compared"
        checked = "every file was read and matches its digest" if self.is_read else only
        return f"step {self.step} was saved in {self.checkpoint} (digest {self.digest}) {how}; {checked}"

    def to_document(self) -> dict[str, Any]:
        """The receipt as JSON values."""
        return dataclasses.asdict(self)
