"""Finds what CRIU cannot dump, before a process is stopped: it would fail after it has stopped all of them."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from safepoint.errors import FreezeError
from safepoint.transparent.criu.trees import name_of

_OBSTACLES = (
    (
        "anon_inode:[io_uring]",
        "uses io_uring, which CRIU cannot dump",
        "start the program with USE_LIBUV=0 (torchrun ignores it), or with a seccomp profile that refuses io_uring",
    ),
)
"""How the target of a descriptor begins, what the process does with it, and what to do about it."""


def refuse_obstacles(pids: Iterable[int], proc: Path = Path("/proc")) -> None:
    """Look at the open files of processes.

    Args:
        pids: the processes.
        proc: where the proc file system is mounted.

    Raises:
        FreezeError: a process has something open that CRIU cannot dump.
    """
    for pid in pids:
        for target in _open_files(proc / str(pid) / "fd"):
            for beginning, reason, hint in _OBSTACLES:
                if target.startswith(beginning):
                    raise FreezeError(
                        f"process {pid} ({name_of(pid, proc)}) {reason}; nothing was frozen",
                        hint=hint,
                    )


def _open_files(folder: Path) -> list[str]:
    found: list[str] = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                found.append(os.readlink(folder / name))
    return found
