"""Lets CUDA processes run again, whatever their state is."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from safepoint.transparent.cuda.driver import CudaDriver, CudaState, DriverError


def for_each(pids: Iterable[int], action: Callable[[int], object]) -> dict[int, str]:
    """Call `action` for all processes at the same time: GPUs copy in parallel, and ranks may wait for each other.

    Returns:
        For each process whose action failed: the driver's reason.
    """
    pids = list(pids)
    failed: dict[int, str] = {}

    def attempt(pid: int) -> None:
        try:
            action(pid)
        except DriverError as error:
            failed[pid] = str(error)

    with ThreadPoolExecutor(max_workers=len(pids) or 1) as threads:
        list(threads.map(attempt, pids))
    return failed


def resume(driver: CudaDriver, pids: Iterable[int], gpus: Mapping[str, str] | None = None) -> dict[int, str]:
    """Restore the GPU memory of checkpointed processes, and unlock all processes. Running processes are not changed.

    Args:
        driver: the way to the driver.
        pids: processes that use CUDA.
        gpus: see `CudaDriver.restore`.

    Returns:
        For each process that still waits: the driver's reason.
    """

    def bring_back(pid: int) -> None:
        state = driver.state(pid)
        if state is CudaState.FAILED:
            raise DriverError("the process has lost its GPU memory")
        if state is CudaState.CHECKPOINTED:
            driver.restore(pid, gpus or {})
        if state is not CudaState.RUNNING:
            driver.unlock(pid)

    return for_each(pids, bring_back)
