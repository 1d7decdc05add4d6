"""Where jobs run: on this machine."""

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
        pvc: for claims of `pvc://<claim>/<path>` the folders that stand for them here, `{"my-claim": "/data"}`; they
            count more than those of the table [pvc] in safepoint.toml.
        working_dir: the folder that jobs run in, and where they find modules that are installed nowhere.
        python: the interpreter that runs them.
        priority: jobs of a higher one go first, and stop those of lower ones.

    Raises:
        ValueError: a folder or the interpreter cannot be meant.
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
                raise ValueError(f"pvc {claim!r}: {path!r} cannot stand for a claim: name a folder without commas")
        if self.working_dir is not None and not os.path.isdir(self.working_dir):
            raise ValueError(f"working_dir {os.fspath(self.working_dir)!r} is no folder")
        if not os.access(self.python, os.X_OK):
            raise ValueError(f"python {self.python!r} is no interpreter: give its full path")

    @property
    def folder(self) -> str:
        """The folder that jobs run in; absolute."""
        return current_folder() if self.working_dir is None else os.path.abspath(self.working_dir)
