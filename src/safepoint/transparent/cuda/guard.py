"""A small process that lets CUDA processes run again if Safepoint is killed while their GPU memory is in host memory.

A CUDA process stays locked when the process that has locked it ends. Without the guard, the locked process would wait
for ever. The kernel closes the guard's pipe when Safepoint ends. Then the guard waits until no process is stopped or
traced, because a stopped process cannot answer the driver. After that, the guard restores all processes. If the
driver refuses, for example because another program uses the memory of the GPU now, the guard tries again every
second, until the processes run or have ended. The guard has a session of its own, so signals to the group of the
command do not reach it.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from safepoint.foundation import clock
from safepoint.foundation.processes import STOPPED, ProcessId, identify, run_state
from safepoint.transparent.cuda.driver import CudaDriver, find_driver
from safepoint.transparent.cuda.resuming import resume

_AGAIN_S = 1.0
_LOOK_S = 0.1


class CudaGuard:
    """Watches over CUDA processes from before they are locked until `release`.

    Args:
        pids: the processes.
        gpus: see `CudaDriver.restore`.
    """

    def __init__(self, pids: Iterable[int], gpus: Mapping[str, str] | None = None) -> None:
        places = [f"{old}={new}" for old, new in (gpus or {}).items()]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "safepoint.transparent.cuda.guard", *map(str, pids), *places],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """End the guard: the processes run or have ended."""
        self._process.kill()
        self._close()

    def take_over(self) -> None:
        """Let the guard restore the processes. It continues after Safepoint has ended."""
        self._close()

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def bring_back(driver: CudaDriver, pids: Iterable[int], gpus: Mapping[str, str]) -> None:
    """Restore the GPU memory of processes. Try again until all of them run or have ended."""
    waiting: list[ProcessId] = [found for pid in pids if (found := identify(pid)) is not None]
    while True:
        waiting = [process for process in waiting if process.is_alive]
        if not waiting:
            return
        if any(run_state(Path(f"/proc/{process.pid}")) in STOPPED for process in waiting):
            clock.sleep(_LOOK_S)
            continue
        failed = resume(driver, [process.pid for process in waiting], gpus)
        waiting = [process for process in waiting if process.pid in failed]
        if waiting:
            clock.sleep(_AGAIN_S)


def main() -> None:
    """Wait for the end of the pipe, then restore the processes that the arguments name."""
    pids = [int(word) for word in sys.argv[1:] if "=" not in word]
    gpus = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    sys.stdin.buffer.read()
    if os.fork() == 0:  # Safepoint, if it still runs, does not wait for the child
        bring_back(find_driver(), pids, gpus)
    os._exit(0)


if __name__ == "__main__":
    main()
