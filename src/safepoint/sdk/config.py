"""`LocalConfig`: how jobs run on this machine."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from safepoint.foundation.environment import current_folder
from safepoint.foundation.field_types import NAMED, PATH, TEXT, check_fields, whole

_KINDS = {"pvc": NAMED, "working_dir": PATH.optional, "python": TEXT, "priority": whole()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """Jobs on this machine, as `safepoint submit` runs them (docs/jobs.md).

    Args:
        pvc: for each claim in a location `pvc://<claim>/<path>`, the folder on this machine: `{"my-claim": "/data"}`.
            It overrides the table [pvc] in safepoint.toml.
        working_dir: the folder that jobs run in. They can import modules from it.
        python: the interpreter that runs the jobs.
        priority: jobs with a higher priority start first, and preempt jobs with a lower one.

    Raises:
        ValueError: a folder does not exist, or `python` is not an interpreter.
    """

    pvc: Mapping[str, str | os.PathLike[str]] = field(default_factory=dict[str, "str | os.PathLike[str]"])
    working_dir: str | os.PathLike[str] | None = None
    python: str = sys.executable
    priority: int = 0

    def __post_init__(self) -> None:
        check_fields(self, _KINDS)
        for claim, folder in self.pvc.items():
            PATH.check(f"pvc[{claim!r}]", folder)
            path = os.fspath(folder)
            if not claim or any(letter in claim for letter in "=,/") or not path or "," in path:
                raise ValueError(f"pvc[{claim!r}] is {path!r}: give the name of a claim, and a folder without commas")
        if self.working_dir is not None and not os.path.isdir(self.working_dir):
            raise ValueError(f"working_dir {os.fspath(self.working_dir)!r} is not a folder")
        if not os.access(self.python, os.X_OK):
            raise ValueError(f"python {self.python!r} is not an interpreter: give its full path")

    @property
    def folder(self) -> str:
        """The absolute path of the folder that jobs run in."""
        return current_folder() if self.working_dir is None else os.path.abspath(self.working_dir)
