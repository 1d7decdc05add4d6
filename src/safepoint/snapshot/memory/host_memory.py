"""How much memory this process may still allocate before the kernel kills a process for lack of memory.

The machine and each control group of this process (version 1 or 2) have a limit. This module uses the limit that
leaves the least memory available.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from safepoint.foundation.processes import kernel_lines
from safepoint.foundation.volumes.mounts import read_mounts

_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much memory may still be allocated.

    Args:
        available_bytes: how much may be allocated before the limit is reached. Page cache that the kernel can drop
            counts as available.
        limit_bytes: the limit of the machine or the control group that has the least memory available.
        limited_by: what sets this limit: `the machine`, or a control group's file.
    """

    available_bytes: int
    limit_bytes: int
    limited_by: str

    @property
    def spare_bytes(self) -> int:
        """How much must stay available for other allocations: a twentieth of the limit, at least 64 MiB."""
        return max(64 << 20, self.limit_bytes // 20)

    def has(self, num_bytes: int) -> bool:
        """Whether `spare_bytes` stay available after an allocation of `num_bytes`."""
        return num_bytes + self.spare_bytes <= self.available_bytes


def look(proc: Path = Path("/proc")) -> Room | None:
    """The memory that may be allocated now, or None where the system does not report it.

    Args:
        proc: where the proc file system is mounted.
    """
    try:
        room = _of_machine(proc)
    except (OSError, ValueError, KeyError):
        return None
    for folder, names in _group_folders(proc):
        with contextlib.suppress(OSError, ValueError):
            found = _of_group(folder, *names)
            if found.available_bytes < room.available_bytes:
                room = found
    return room


def _of_machine(proc: Path) -> Room:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    available, total = (int(fields[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    return Room(available_bytes=available, limit_bytes=total, limited_by="the machine")


_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _of_group(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> Room:
    text = (folder / limit_name).read_text().strip()
    limit = _UNLIMITED_BYTES if text == "max" else int(text)
    usage = int((folder / usage_name).read_text())
    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    available = limit - usage + int(statistics.get(cache_name, 0))
    return Room(available_bytes=max(0, available), limit_bytes=limit, limited_by=str(folder / limit_name))


def _group_folders(proc: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """The folders of this process's memory control group and of the groups above it, with their files' names."""
    folders: list[tuple[Path, tuple[str, str, str]]] = []
    try:
        mounts = read_mounts(proc / "self" / "mountinfo")
        lines = kernel_lines(proc / "self" / "cgroup")
    except OSError:
        return folders
    for line in filter(None, map(os.fsdecode, lines)):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        kind, names = ("cgroup", _VERSION_1) if controllers else ("cgroup2", _VERSION_2)
        for mount in mounts:
            if mount.kind != kind or (kind == "cgroup" and "memory" not in mount.options.split(",")):
                continue
            with contextlib.suppress(ValueError):
                below = PurePosixPath(path).relative_to(mount.root)
                own = Path(mount.point, below)
                while own.is_relative_to(mount.point):
                    folders.append((own, names))
                    own = own.parent
    return folders
