"""The mount of a folder, as the kernel describes it in /proc/self/mountinfo."""

import re
from dataclasses import dataclass
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")
_NUM_FIELDS = 6
"""The fields of a line before the optional ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One mount.

    Args:
        point: where it is mounted.
        root: the folder of the file system that is mounted there: `/`, or a folder in it for a bind mount.
        kind: the type of the file system, as the kernel calls it.
    """

    point: Path
    root: str
    kind: str


def mount_of(folder: Path) -> Mount | None:
    """The mount that holds `folder`; None if it is unknown."""
    try:
        folder = folder.resolve()
        text = _MOUNTS.read_text(encoding="utf-8", errors="replace")
    except (OSError, RuntimeError):
        return None
    mounts: dict[Path, Mount] = {}
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if separator and after and len(fields) >= _NUM_FIELDS:
            point = Path(_unescaped(fields[4]))  # a later mount at the same point hides an earlier one
            mounts[point] = Mount(point=point, root=_unescaped(fields[3]), kind=after.split(" ")[0])
    return next((mounts[path] for path in (folder, *folder.parents) if path in mounts), None)


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), text)
