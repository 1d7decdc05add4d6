"""Finds the processes that use a GPU, and checks the settings of NCCL that a restore needs."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from safepoint.errors import FreezeError
from safepoint.foundation.processes import name_of
from safepoint.transparent.criu.trees import environment_of, open_files

NCCL_SETTINGS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
"""Without these settings, NCCL maps the memory of other processes and GPUs, which the driver cannot copy."""
_DEVICE = "/dev/nvidia"
_NCCL_THREADS = ("pt_nccl", "NCCL")
"""Names of threads of PyTorch and NCCL. A mapped library does not show that NCCL is used: PyTorch always maps it."""


def gpu_users(pids: Iterable[int], proc: Path = Path("/proc")) -> list[int]:
    """The processes that have the device of an NVIDIA GPU open, in the given order.

    Args:
        pids: the processes.
        proc: where the proc file system is mounted.
    """
    return [pid for pid in pids if any(target.startswith(_DEVICE) for target in open_files(pid, proc))]


def refuse_unfit_nccl(pids: list[int], proc: Path = Path("/proc")) -> None:
    """Check the settings of processes that are connected by NCCL. A single process has no such connections.

    Args:
        pids: all processes of a tree that use a GPU.
        proc: where the proc file system is mounted.

    Raises:
        FreezeError: a setting is missing; nothing was frozen.
    """
    connected = [pid for pid in pids if _has_nccl(pid, proc)]
    if len(connected) < 2:
        return
    for pid in connected:
        environment = environment_of(pid, proc)
        missing = [f"{name}={value}" for name, value in NCCL_SETTINGS.items() if environment.get(name) != value]
        if missing:
            raise FreezeError(
                f"process {pid} ({name_of(pid, proc)}) uses NCCL without {' '.join(missing)}, so the driver cannot "
                "copy its GPU memory; nothing was frozen",
                hint=f"start the program with {' '.join(f'{name}={value}' for name, value in NCCL_SETTINGS.items())}",
            )


def _has_nccl(pid: int, proc: Path) -> bool:
    with contextlib.suppress(OSError):
        for task in (proc / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                if (task / "comm").read_text(errors="replace").startswith(_NCCL_THREADS):
                    return True
    return False
