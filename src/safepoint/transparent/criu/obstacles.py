"""Finds, before a process is stopped, what CRIU cannot dump. CRIU itself would fail only after it has stopped all."""

from collections.abc import Iterable
from pathlib import Path

from safepoint.errors import FreezeError
from safepoint.transparent.criu.trees import name_of, open_files

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
        for target in open_files(pid, proc):
            for beginning, reason, hint in _OBSTACLES:
                if target.startswith(beginning):
                    raise FreezeError(
                        f"process {pid} ({name_of(pid, proc)}) {reason}; nothing was frozen",
                        hint=hint,
                    )
