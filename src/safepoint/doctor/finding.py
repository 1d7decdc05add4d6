"""The result of one check."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Whether a training can rely on it."""

    OK = "ok"
    WARNING = "warning"
    """A training works, but slower or less safely than it could."""
    FAILURE = "failure"
    """A training does not work, or does not survive an interruption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check.

    Args:
        check: its name, in a word or two.
        status: how it is.
        found: the facts.
        why: why a training needs it.
        fix: what to do; empty when the status is ok.
    """

    check: str
    status: Status
    found: str
    why: str
    fix: str = ""

    def __post_init__(self) -> None:
        if (self.status is not Status.OK) != bool(self.fix):
            raise ValueError(f"fix={self.fix!r} of {self.check}: a fix is required unless the status is ok")
