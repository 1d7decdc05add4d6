"""The result of one check."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    """A training works, but it is slower or loses more after an interruption."""
    FAILURE = "failure"
    """A training does not work, or does not survive an interruption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check.

    Args:
        check: the name of the check.
        status: the result.
        found: the facts.
        why: why the check matters for a training.
        fix: what to do; empty if the status is ok.
    """

    check: str
    status: Status
    found: str
    why: str
    fix: str = ""

    def __post_init__(self) -> None:
        if (self.status is not Status.OK) != bool(self.fix):
            raise ValueError(
                f"fix={self.fix!r} of {self.check}: a fix must be given unless the status is ok, and only then"
            )
