"""The GPUs of this machine: their UUIDs, their used memory, and which of them replace the GPUs of another machine."""

import contextlib
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence

from safepoint.errors import FreezeError

_ANSWER_S = 10.0
_MEBIBYTE = 1 << 20


def gpu_uuids() -> tuple[str, ...]:
    """The UUIDs of all GPUs of this machine; empty if `nvidia-smi` does not answer."""
    return tuple(row[0] for row in _query("--query-gpu=uuid"))


def used_bytes(pids: Iterable[int]) -> int:
    """An upper limit of the GPU memory of processes, in bytes.

    In a container, the driver may report other process numbers. Then all used GPU memory counts.
    """
    wanted = set(pids)
    found: Counter[int] = Counter()
    for pid, used in _numbers("--query-compute-apps=pid,used_gpu_memory"):  # one row for each GPU that a process uses
        found[int(pid)] += int(used)
    if wanted <= found.keys():
        return sum(found[pid] for pid in wanted) * _MEBIBYTE
    return sum(int(used) for (used,) in _numbers("--query-gpu=memory.used")) * _MEBIBYTE


def places_for(recorded: Sequence[str], present: Sequence[str]) -> dict[str, str]:
    """For each GPU of the recorded machine, the GPU that replaces it; empty if this machine has all recorded GPUs.

    If only some of the recorded GPUs are present, each of these GPUs replaces itself. The driver needs an entry for
    each recorded GPU, and checks that the replacements are of the same kind.

    Args:
        recorded: the GPUs of the machine on which the processes were frozen.
        present: the GPUs of this machine.

    Raises:
        FreezeError: this machine has fewer GPUs; nothing was restored.
    """
    if set(recorded) <= set(present):
        return {}
    free = [uuid for uuid in present if uuid not in recorded]
    absent = [uuid for uuid in recorded if uuid not in present]
    if len(free) < len(absent):
        raise FreezeError(
            f"the processes were frozen on a machine with {len(recorded)} GPUs, and this machine has {len(present)}; "
            "nothing was restored",
            hint="restore the image on a machine with the same number of GPUs of the same kind",
        )
    return {uuid: uuid for uuid in recorded if uuid in present} | dict(zip(absent, free, strict=False))


def _numbers(question: str) -> list[list[str]]:
    return [row for row in _query(question, "nounits") if all(cell.isdecimal() for cell in row)]


def _query(question: str, *more: str) -> list[list[str]]:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(
            ["nvidia-smi", question, ",".join(("--format=csv", "noheader", *more))],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_ANSWER_S,
        )
        if answer.returncode == 0:
            return [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]
    return []
