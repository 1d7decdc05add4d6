"""The mounts of this machine, as the kernel lists them in /proc/self/mountinfo.

If FUSE is set up, every user can mount a file system of their own, in a folder of any name. Such a file system may
state any owner for its files, and may hide them from other users or never answer.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from safepoint.foundation.processes import kernel_lines

_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(rb"\\([0-7]{3})")
_FUSE, _FUSE_USER = "fuse", re.compile(r"(?:^|,)user_id=(\d+)(?:,|$)")
_NUM_FIELDS = 6
"""The fields of a line before the optional fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One mount.

    Args:
        point: where it is mounted.
        root: the folder of the file system that is mounted there: `/`, or a folder in it for a bind mount.
        kind: the type of the file system, as the kernel calls it.
        options: the options of the file system, separated by commas.
    """

    point: Path
    root: str
    kind: str
    options: str = field(default="", compare=False)


def read_mounts(table: Path | None = None) -> list[Mount]:
    """All mounts. A mount hides earlier mounts at the same point.

    Args:
        table: the file with the kernel's list; None for the list of this process.

    Raises:
        OSError: the list cannot be read.
    """
    found: list[Mount] = []
    for line in kernel_lines(_MOUNTS if table is None else table):
        before, separator, after = line.partition(b" - ")
        fields, described = before.split(b" "), after.split(b" ")
        if separator and len(fields) >= _NUM_FIELDS and described[0]:
            found.append(
                Mount(
                    point=Path(_unescaped(fields[4])),
                    root=_unescaped(fields[3]),
                    kind=os.fsdecode(described[0]),
                    options=os.fsdecode(described[-1]),
                )
            )
    return found


def mount_of(folder: Path) -> Mount | None:
    """The mount that holds `folder`; None if it is unknown."""
    try:
        folder = folder.resolve()
        mounts = {mount.point: mount for mount in read_mounts()}
    except (OSError, RuntimeError):
        return None
    return next((mounts[path] for path in (folder, *folder.parents) if path in mounts), None)


def file_system_of(folder: Path) -> str:
    """The type of the file system that holds `folder`, as the kernel calls it; empty when it is unknown."""
    mount = mount_of(folder)
    return "" if mount is None else mount.kind


def mounted_by_others() -> set[Path]:
    """The mount points of FUSE file systems of other users, but not of root; empty if they are unknown."""
    try:
        mounts = [mount for mount in read_mounts() if mount.kind.startswith(_FUSE)]
    except OSError:
        return set()
    users = {mount.point: _FUSE_USER.search(mount.options) for mount in mounts}
    return {point for point, user in users.items() if user is not None and int(user[1]) not in {os.geteuid(), 0}}


def is_mounted_by_other(path: str | os.PathLike[str]) -> bool:
    """Whether another user, but not root, has mounted a FUSE file system at `path`.

    Call this function before any other function that uses the path. The file system of another user may state that
    its files belong to the user of this process, and may never answer. This function does not read it.
    """
    absolute = Path(path).absolute()
    return Path(os.path.realpath(absolute.parent), absolute.name) in mounted_by_others()


def without_mounts_of_others(parent: Path, pattern: str) -> list[Path]:
    """The paths in a folder whose names match `pattern`, sorted.

    File systems that other users have mounted are left out: they may never answer.
    """
    real, others = Path(os.path.realpath(parent)), mounted_by_others()
    return [path for path in sorted(parent.glob(pattern)) if real / path.name not in others]


def _unescaped(text: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), text))
