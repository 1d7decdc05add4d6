"""Checks of this machine: Python, memory, open files, and the clock."""

import ctypes
import os
import platform
import resource
import sys

from safepoint.doctor.finding import Finding, Status
from safepoint.foundation.units import format_bytes
from safepoint.snapshot.memory import block, host_memory

_LEAST_DEV_SHM_BYTES = 512 << 20
_LEAST_OPEN_FILES = 4096
_MOST_SKEW_S = 30.0
_ADJTIMEX_BYTES = 256  # the size of the buffer; no `struct timex` is larger
_TIME_ERROR = 5


def judge_python() -> Finding:
    """Whether this Python and this system are supported."""
    found = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    why = "Safepoint uses signals, shared memory and durable renames of Linux"
    if not sys.platform.startswith("linux"):
        return Finding(
            check="python", status=Status.FAILURE, found=f"{found}, on {sys.platform}", why=why, fix="train on Linux"
        )
    return Finding(check="python", status=Status.OK, found=found, why=why)


def judge_memory(state_bytes: int | None) -> Finding:
    """Whether there is memory for snapshots.

    Args:
        state_bytes: the size of a checkpoint; None if unknown.
    """
    check, why = (
        "memory",
        "snapshots are copied to shared memory, so that training does not wait for the disk",
    )
    room = host_memory.look()
    if not block.are_available() or room is None:
        return Finding(
            check=check,
            status=Status.WARNING,
            found="memfd_create is not allowed, or the amount of available memory is unknown",
            why=why,
            fix="allow memfd_create in the container's seccomp profile; otherwise, training waits for each save",
        )
    found = f"{format_bytes(room.available_bytes)} available, limited by {room.limited_by}"
    if state_bytes is not None:
        found += f"; a snapshot takes {format_bytes(state_bytes)}"
    if state_bytes is None or room.has(state_bytes):
        return Finding(check=check, status=Status.OK, found=found, why=why)
    return Finding(
        check=check,
        status=Status.WARNING,
        found=found,
        why=why,
        fix="give the job more memory; otherwise, training waits for each save",
    )


def judge_dev_shm(folder: str = "/dev/shm") -> Finding:
    """Whether data loaders and NCCL have shared memory."""
    check, why = "/dev/shm", "data loader workers and NCCL exchange data there; when it is full, they end with SIGBUS"
    try:
        status = os.statvfs(folder)
    except OSError as error:
        fix = "mount a tmpfs at /dev/shm"
        return Finding(check=check, status=Status.WARNING, found=error.strerror or str(error), why=why, fix=fix)
    free = status.f_bavail * status.f_frsize
    found = f"{format_bytes(free)} of {format_bytes(status.f_blocks * status.f_frsize)} free"
    if free >= _LEAST_DEV_SHM_BYTES:
        return Finding(check=check, status=Status.OK, found=found, why=why)
    return Finding(
        check=check,
        status=Status.WARNING,
        found=found,
        why=why,
        fix="make /dev/shm larger: docker run --shm-size 8g, or in a pod an emptyDir with medium: Memory",
    )


def judge_open_files() -> Finding:
    """Whether a process may open enough files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    found = f"{'unlimited' if soft == resource.RLIM_INFINITY else soft}, can be raised to {most}"
    why = "each tensor from a data loader worker, and each block of a snapshot, is an open file"
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_OPEN_FILES:
        return Finding(check="open files", status=Status.OK, found=found, why=why)
    fix = f"run `ulimit -n {_LEAST_OPEN_FILES * 16}` before the start, or set LimitNOFILE of the service"
    return Finding(check="open files", status=Status.WARNING, found=found, why=why, fix=fix)


def judge_clock(ahead_s: float | None) -> Finding:
    """Compare the clocks of this machine and of the output location. A difference of over 30 s is a warning.

    The result also says whether a time service sets the clock. A missing time service is not a warning.

    Args:
        ahead_s: the clock of the output location minus the clock of this machine; None if unknown.
    """
    check, why = (
        "clock",
        "object stores refuse requests when clocks differ by 15 minutes, and retention by age uses the clock",
    )
    is_kept = _is_synchronised()
    service = {True: "synchronised by a time service", False: "not synchronised by a time service", None: ""}[is_kept]
    skew = "" if ahead_s is None else f"within {abs(ahead_s):.0f} s of the output location"
    if ahead_s is not None and abs(ahead_s) > _MOST_SKEW_S:
        return Finding(
            check=check,
            status=Status.WARNING,
            found=f"{abs(ahead_s):.0f} s {'behind' if ahead_s > 0 else 'ahead of'} the output location",
            why=why,
            fix="run a time service, such as chrony, on the machine whose clock is wrong",
        )
    found = ", ".join(part for part in (service, skew) if part) or "it is unknown whether the clock is correct"
    return Finding(check=check, status=Status.OK, found=found, why=why)


def _is_synchronised() -> bool | None:
    """Whether the kernel reports a synchronised clock; None if `adjtimex` is not allowed."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_ADJTIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR
