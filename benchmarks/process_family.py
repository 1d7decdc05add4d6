"""The processes that one measurement has started, found by a variable in their environment.

Neither a fork of a fork nor a session of its own hides a process from it; one that clears its environment would.
"""

import os
import signal
import time
from pathlib import Path

MARK = "HF_BENCH_FAMILY"


def family(mark: str) -> list[int]:
    """The processes of this user that were started with the mark, by pid."""
    wanted = f"{MARK}={mark}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # somebody else's, or just gone
        if wanted in variables:
            found.append(int(entry.name))
    return found


def pss_bytes(mark: str) -> int:
    """Resident memory of the processes; a page that several of them map counts once."""
    total = 0
    for pid in family(mark):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def end(mark: str, *, grace_s: float) -> list[str]:
    """Wait a moment, then end the remaining processes; returns their commands."""
    await_end(mark, grace_s)
    left = [command_of(pid) for pid in family(mark)]
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for pid in family(mark):
            try:
                os.kill(pid, sent)
            except ProcessLookupError:
                continue
        await_end(mark, grace_s)
    return left


def await_end(mark: str, limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while family(mark) and time.monotonic() < deadline_s:
        time.sleep(0.02)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    except OSError:
        return f"process {pid}"
