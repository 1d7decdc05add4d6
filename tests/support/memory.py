"""The memory of a process, measured by itself, and the named shared memory of the system.

`getrusage` will not do: a process inherits the maximum of its parent.
"""

import os

MEASURE = """
from pathlib import Path as _Path


def _status(field):
    lines = _Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def begin_measure():
    global _before
    _Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    _before = _status("VmRSS:")


def grown_mb():
    return (_status("VmHWM:") - _before) / 1e6
"""
"""Source for the beginning of a program: `begin_measure()`, then `grown_mb()`, by how much its peak has grown."""


def shared_files() -> set[str]:
    """The files in /dev/shm, without folders, semaphores and torch's own files of other processes."""
    mine = f"torch_{os.getpid()}_"
    return {
        entry.name
        for entry in os.scandir("/dev/shm")
        if not entry.is_dir()
        and not entry.name.startswith("sem.")
        and (entry.name.startswith(mine) or not entry.name.startswith("torch_"))
    }


__all__ = ["MEASURE", "shared_files"]
