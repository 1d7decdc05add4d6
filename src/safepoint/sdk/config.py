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
    """How to run jobs on this machine. `safepoint submit` makes the same kind of jobs (docs/jobs.md).

    Args:
        pvc: the folder on this machine for each claim (volume), such as `{"my-claim": "/data"}`. For a location
            `pvc://<claim>/<path>`, jobs use the folder of the claim. These folders override the table [pvc] in
            safepoint.toml.
        working_dir: the folder that jobs run in, and from which they can import modules; None for the current folder.
        python: the path of the interpreter that runs the jobs.
        priority: jobs with a higher priority start first, and preempt jobs with a lower one.

    Raises:
        ValueError: `working_dir` is not a folder, `python` cannot be executed, or another field is invalid.
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
            raise ValueError(f"python {self.python!r} cannot be executed: give the full path of an interpreter")

    @property
    def folder(self) -> str:
        """The absolute path of the folder that jobs run in."""
        return current_folder() if self.working_dir is None else os.path.abspath(self.working_dir)
