"""The memory of a process, measured by itself.

`getrusage` will not do: its maximum is handed down from whoever has started the process.
"""

MEASURE = """
from pathlib import Path as _Path


def _status(field):
    lines = _Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def begin_measure():
    global _before
    _Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    _before = _status("VmRSS:")


def grown_mb():
    return (_status("VmHWM:") - _before) / 1e6
"""
"""Source for the beginning of a program: `begin_measure()`, then `grown_mb()`, by how much its peak has grown."""

__all__ = ["MEASURE"]
