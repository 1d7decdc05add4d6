"""One thing that was looked at."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Whether a training can rely on it."""

    OK = "ok"
    WARNING = "warning"
    """A training works, and will be slower or less safe than it could be."""
    FAILURE = "failure"
    """A training does not work, or does not survive what it is meant to survive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found.

    Args:
        check: what was looked at, in a word or two.
        status: how it is.
        found: the facts.
        why: why a training needs it.
        fix: what to do; empty where nothing is to be done.
    """

    check: str
    status: Status
    found: str
    why: str
    fix: str = ""

    def __post_init__(self) -> None:
        if (self.status is not Status.OK) != bool(self.fix):
            raise ValueError(f"fix={self.fix!r} of {self.check}: whatever is not ok needs one, and nothing else")
