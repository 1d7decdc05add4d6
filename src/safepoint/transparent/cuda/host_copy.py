"""Moves the GPU memory of a process tree to host memory for the time of a dump, and back.

Promises: either all processes are locked, or none. After any failure all processes run again, even if Safepoint is
killed (`transparent.cuda.guard`). A freeze that is known to fail is refused before a process is locked.
"""

import contextlib
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

from safepoint.errors import FreezeError
from safepoint.foundation import clock
from safepoint.foundation.processes import name_of
from safepoint.foundation.units import format_bytes
from safepoint.snapshot.memory import host_memory
from safepoint.transparent.cuda.driver import CudaDriver, CudaState, DriverError, find_driver
from safepoint.transparent.cuda.gpus import gpu_uuids, places_for, used_bytes
from safepoint.transparent.cuda.guard import CudaGuard
from safepoint.transparent.cuda.resuming import for_each, resume
from safepoint.transparent.cuda.users import gpu_users, refuse_unfit_nccl

LOCK_S = 5.0
"""How long a process may take to finish the CUDA calls that it has begun."""
_NUM_ATTEMPTS = 3
_PAUSE_S = 0.3
_RETRIED = "Safepoint tries again every second until they run"


class HostCopy:
    """Processes whose GPU memory is in host memory.

    Args:
        driver: the way to the driver; None if no process uses a GPU.
        pids: the processes that use a GPU.
        gpus: the UUIDs of all GPUs of this machine; empty if no process uses one.
        since_s: when the processes began to wait for their GPUs, on the monotonic clock; the current time if no
            process uses a GPU.
    """

    def __init__(
        self,
        driver: CudaDriver | None = None,
        pids: Sequence[int] = (),
        gpus: tuple[str, ...] = (),
        since_s: float | None = None,
    ) -> None:
        self.pids = pids
        self.gpus = gpus
        self.since_s = clock.monotonic_s() if since_s is None else since_s
        self._driver = driver

    def resume(self) -> None:
        """Let the processes run on their GPUs again.

        Raises:
            FreezeError: the driver cannot restore the memory of a process. The process waits.
        """
        if self._driver is None:
            return
        if failed := resume(self._driver, self.pids):
            raise FreezeError(
                f"the GPU memory of {_reasons(failed)} could not be restored, so the processes wait; {_RETRIED}",
                hint="end other programs that use the memory of the GPU",
            )


@contextlib.contextmanager
def gpu_memory_in_host(
    pids: Iterable[int], *, driver: CudaDriver | None = None, lock_s: float = LOCK_S, proc: Path = Path("/proc")
) -> Generator[HostCopy]:
    """Move the GPU memory of the processes that use a GPU to host memory.

    In the `with` block, call `resume` to let the processes run on, or end them. After an exception they run on.

    Args:
        pids: the processes of a tree.
        driver: the way to the driver; None to use the way that this machine has.
        lock_s: how long a process may take to finish the CUDA calls that it has begun.
        proc: where the proc file system is mounted.

    Raises:
        UnsupportedError: this machine has no way to the checkpoint API; nothing was frozen.
        FreezeError: the driver refuses, or there is no room for the memory. The processes run on; if the driver
            cannot restore their GPU memory yet, they wait until it can.
    """
    users = gpu_users(pids, proc)
    if not users:
        yield HostCopy()
        return
    driver = driver or find_driver()
    gpus = gpu_uuids()
    _refuse_unfit(driver, users, gpus, proc)
    guard = CudaGuard(users)
    try:
        since_s = clock.monotonic_s()
        _lock(driver, users, lock_s)
        _checkpoint(driver, users, proc)
        yield HostCopy(driver, users, gpus, since_s)
    except BaseException:
        if resume(driver, users):
            guard.take_over()
        else:
            guard.release()
        raise
    guard.release()


def places_on_this_machine(recorded: Sequence[str]) -> dict[str, str]:
    """Check, before processes are restored, that their GPU memory can be restored.

    Args:
        recorded: the GPUs of the machine on which the processes were frozen; empty if none was used.

    Returns:
        For each recorded GPU, the GPU that replaces it; empty if the GPUs are the same.

    Raises:
        UnsupportedError: this machine has no way to the checkpoint API.
        FreezeError: this machine has fewer GPUs.
    """
    if not recorded:
        return {}
    find_driver()
    return places_for(recorded, gpu_uuids())


def resume_restored(pids: Iterable[int], places: dict[str, str], *, driver: CudaDriver | None = None) -> None:
    """Restore the GPU memory of processes that CRIU has restored.

    Args:
        pids: the processes of the tree.
        places: see `places_on_this_machine`.
        driver: the way to the driver; None to use the way that this machine has.

    Raises:
        FreezeError: the driver cannot restore the memory of a process.
    """
    driver = driver or find_driver()
    users = [pid for pid in pids if _uses_cuda(driver, pid)]
    guard = CudaGuard(users, places)
    try:
        failed = resume(driver, users, places)
    finally:
        guard.release()
    if failed or not users:
        raise FreezeError(
            f"the GPU memory of {_reasons(failed) if failed else 'the processes'} could not be restored",
            hint="end other programs that use the memory of the GPU; the GPUs and their driver must be like those of "
            "the machine on which the processes were frozen",
        )


def _refuse_unfit(driver: CudaDriver, pids: list[int], gpus: Sequence[str], proc: Path) -> None:
    """Raise FreezeError if the freeze is known to fail. No process is locked yet."""
    if not gpus:
        raise FreezeError(
            "nvidia-smi does not name the GPUs of this machine, which the image must record; nothing was frozen",
            hint="install nvidia-smi, or start the container with the driver's capability `utility`",
        )
    refuse_unfit_nccl(pids, proc)
    for pid in pids:
        named = f"process {pid} ({name_of(pid, proc)})"
        try:
            state = driver.state(pid)
        except DriverError as error:
            raise FreezeError(
                f"{named} uses a GPU, and the driver cannot checkpoint the process: {error}; nothing was frozen",
                hint="`safepoint doctor` shows the driver, which cannot handle unified memory, MIG or MPS",
            ) from error
        if state is not CudaState.RUNNING:
            raise FreezeError(
                f"the driver reports the state `{state}` for {named}, not `running`; nothing was frozen",
                hint="if another program uses the driver's checkpoint API, wait until that program is done; "
                "otherwise restart the process",
            )
    room, needed = host_memory.look(proc), used_bytes(pids)
    if room is not None and not room.has(needed):
        raise FreezeError(
            f"the GPU memory of the processes (up to {format_bytes(needed)}) does not fit into host memory: "
            f"{room.limited_by} has {format_bytes(room.available_bytes)} left; nothing was frozen",
            hint="free some memory, or save a checkpoint in the training instead",
        )


def _lock(driver: CudaDriver, pids: list[int], lock_s: float) -> None:
    """Lock all processes, or raise FreezeError with all processes unlocked.

    A rank that waits in a collective call for a locked rank cannot be locked. So all ranks are locked at the same
    time. If that fails, all of them are unlocked, and the next attempt begins.
    """
    failed: dict[int, str] = {}
    for attempt in range(_NUM_ATTEMPTS):
        if attempt:
            clock.sleep(_PAUSE_S)
        failed = for_each(pids, lambda pid: driver.lock(pid, int(lock_s * 1000)))
        if not failed:
            return
        resume(driver, pids)
    raise FreezeError(
        f"the CUDA calls of {_reasons(failed)} did not end in {_NUM_ATTEMPTS} attempts of {lock_s:g} s; all "
        "processes run on, and nothing was frozen",
        hint="try again later; a kernel that waits for another process cannot be frozen",
    )


def _checkpoint(driver: CudaDriver, pids: list[int], proc: Path) -> None:
    if failed := for_each(pids, driver.checkpoint):
        raise FreezeError(
            f"the driver cannot copy the GPU memory of {_reasons(failed)}; all processes run on, and no image was "
            "made",
            hint="unified memory, MIG and MPS are not supported by the driver",
        )
    if left := gpu_users(pids, proc):
        raise FreezeError(
            f"process {left[0]} ({name_of(left[0], proc)}) uses a GPU without CUDA; the processes run on, "
            "and nothing was frozen",
            hint="save a checkpoint in the training instead",
        )


def _uses_cuda(driver: CudaDriver, pid: int) -> bool:
    try:
        driver.state(pid)
    except DriverError:
        return False
    return True


def _reasons(failed: dict[int, str]) -> str:
    pid, reason = min(failed.items())
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return f"process {pid} ({reason}){more}"
