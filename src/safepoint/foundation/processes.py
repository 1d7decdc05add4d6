"""Which process is which: a pid alone may be another one's by now.

Everything is read from /proc. A job's processes are found by the variable that its launchers set, which whatever they
start inherits; so nothing that left its parent is missed.
"""

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
JOB_VARIABLE = "SAFEPOINT_JOB_DIR"
"""Names a job's folder in all its processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """One process for certain.

    Args:
        pid: its number.
        start_ticks: when it started, in clock ticks since the machine did.
        boot: the machine's start.
    """

    pid: int
    start_ticks: int
    boot: str

    @property
    def is_alive(self) -> bool:
        """Whether it is there and not just waiting to be reaped."""
        return _start_ticks(self.pid) == self.start_ticks and boot_id() == self.boot

    def send(self, number: int) -> None:
        """Send a signal, if it is still there."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def identify(pid: int) -> ProcessId | None:
    """What identifies the process; None when there is none."""
    ticks = _start_ticks(pid, also_ended=True)  # a child may have ended already, and still is who it is
    return None if ticks is None else ProcessId(pid=pid, start_ticks=ticks, boot=boot_id())


def boot_id() -> str:
    """Names this start of the machine."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def processes_of(folder: Path) -> list[int]:
    """The processes of a job, by its folder; the caller's own is never among them."""
    wanted = f"{JOB_VARIABLE}={folder}".encode()
    found: list[int] = []
    for entry in os.listdir(_PROC):
        if entry.isdecimal() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (_PROC / entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return [pid for pid in found if _start_ticks(pid) is not None]


def kill(pids: Iterable[int]) -> None:
    """End them at once."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _start_ticks(pid: int, *, also_ended: bool = False) -> int | None:
    try:
        # The name in brackets may hold anything; behind it, the third field is the state, the 22nd the start.
        parts = (_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if parts[0] in {"Z", "X"} and not also_ended else int(parts[19])
