"""The space that the checkpoints of one run occupy in a folder, and how much each further save will add.

A forecast of the free space of a folder needs both (`estimates.forecast`).
"""

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, PART_NAME
from safepoint.checkpoint.format.verify import read_manifest_of_any
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import (
    Candidate,
    KeepBest,
    KeepEvery,
    KeepNewest,
    KeepYounger,
    Policy,
    select_superseded,
)
from safepoint.checkpoint.local.thinning import under_pressure
from safepoint.errors import ManifestError
from safepoint.foundation import clock
from safepoint.foundation.volumes.occupied import Occupied, occupied

_Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The checkpoints of one run in a folder.

    Args:
        checkpoints: the candidates for retention, newest first.
        newest: the space that the newest checkpoint occupies; None if there is no checkpoint.
        total: the space that all checkpoints, the unfinished saves and the files in the trash occupy.
    """

    checkpoints: tuple[Candidate, ...] = ()
    newest: Occupied | None = None
    total: Occupied = field(default_factory=Occupied)

    def num_deletable(self, policies: Sequence[Policy]) -> int:
        """How many checkpoints thinning may delete. Leases and protected steps are not taken into account."""
        pressed = under_pressure(policies)
        return len(select_superseded(self.checkpoints, pressed, now_s=clock.wall_s()))

    @property
    def steps_between(self) -> int | None:
        """Steps between the newest two checkpoints; None if there are fewer than two checkpoints."""
        if len(self.checkpoints) < 2:
            return None
        return self.checkpoints[0].step - self.checkpoints[1].step


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How the number of checkpoints will grow.

    Args:
        saves_until_limit: how many more saves increase the number of checkpoints; None if all checkpoints stay.
        share_later: of all later saves, the share whose checkpoints are never deleted, from 0 to 1.
    """

    saves_until_limit: int | None
    share_later: float = 0.0


def growth_of(usage: Usage, policies: Sequence[Policy], interval_s: float | None) -> Growth:
    """How the number of checkpoints will grow under these policies.

    Args:
        usage: the usage of the folder.
        policies: the retention policies of the run.
        interval_s: the time between two saves, in seconds; None if it is not known.
    """
    if not any(policy.is_limit for policy in policies):
        return Growth(saves_until_limit=None, share_later=1.0)
    most, share = 0, 0.0
    for policy in policies:
        match policy:
            case KeepNewest() | KeepBest():
                most += policy.count
            case KeepYounger():
                most += math.ceil(policy.seconds / interval_s) if interval_s else 0
            case KeepEvery():
                between = usage.steps_between
                share += 1.0 if between is None else min(1.0, between / policy.steps)
            case _:
                pass
    left = max(0, max(1, most) - len(usage.checkpoints))
    return Growth(saves_until_limit=left, share_later=min(1.0, share))


class UsageReader:
    """Reads the usage of a folder again and again. A checkpoint is read again only if its manifest has changed.

    Args:
        output: the folder.
        run_id: the run.
        policies: the retention policies of the run; metrics that they do not use are not kept in memory.
    """

    def __init__(self, output: OutputFolder, run_id: str, policies: Sequence[Policy]) -> None:
        self._output = output
        self._policies = policies
        self._run_id = run_id
        self._known: dict[str, tuple[_Stamp, Candidate | None, Occupied]] = {}

    def read(self) -> Usage:
        """The usage now.

        Raises:
            OSError: the folder cannot be read.
        """
        found: dict[str, tuple[_Stamp, Candidate | None, Occupied]] = {}
        for path in self._output.checkpoints():
            with contextlib.suppress(OSError, ManifestError):
                stamp = _stamp_of(path)
                known = self._known.get(path.name)
                found[path.name] = known if known is not None and known[0] == stamp else (stamp, *self._look(path))
        self._known = found
        own = sorted(
            ((candidate, size) for _, candidate, size in found.values() if candidate is not None),
            key=lambda pair: -pair[0].step,
        )
        sizes = [size for _, size in own]
        sizes += [occupied(self._output.work), occupied(self._output.trash)]
        return Usage(
            checkpoints=tuple(candidate for candidate, _ in own),
            newest=own[0][1] if own else None,
            total=Occupied(
                num_bytes=sum(size.num_bytes for size in sizes), num_inodes=sum(size.num_inodes for size in sizes)
            ),
        )

    def _look(self, path: Path) -> tuple[Candidate | None, Occupied]:
        manifest = read_manifest_of_any(path)
        if manifest.run_id != self._run_id or manifest.step != step_of(path):
            return None, Occupied()
        size = occupied(path)
        # `occupied` does not count files that have a second name, but the manifest of a whole checkpoint lists them.
        if not (path / PART_NAME).exists():
            size = Occupied(
                num_bytes=max(size.num_bytes, manifest.size_bytes),
                num_inodes=max(size.num_inodes, len(manifest.files)),
            )
        return Candidate.of(manifest, self._policies), size


def _stamp_of(path: Path) -> _Stamp:
    try:
        status = os.lstat(path / MANIFEST_NAME)
    except FileNotFoundError:
        status = os.lstat(path / PART_NAME)
    return status.st_ino, status.st_mtime_ns, status.st_size
