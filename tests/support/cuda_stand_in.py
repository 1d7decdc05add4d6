"""A stand-in for NVIDIA's driver: it keeps the states of processes, and fails where a test says so.

As a program, it takes the arguments of `cuda-checkpoint`, and keeps the states in the folder that the variable
STAND_IN_STATES names: a file for each process, which must be there. If there is a file `signals`, a process gets
SIGUSR1 to close its device, waits, gets SIGUSR2, and has to open its device again.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from safepoint.transparent.cuda.driver import CudaState, DriverError
from safepoint.transparent.cuda.users import gpu_users

STATES = "STAND_IN_STATES"
_AFTER = {
    ("lock", "running"): "locked",
    ("checkpoint", "locked"): "checkpointed",
    ("restore", "checkpointed"): "locked",
    ("unlock", "locked"): "running",
}


class StandInDriver:
    """A `CudaDriver`. `proc` is a folder like /proc, in which each process with a GPU has it open.

    Args:
        proc: see `open_gpu`.
        fail: called with the action and the process before each action; it raises DriverError to fail it.
    """

    name = "stand-in"

    def __init__(self, proc: Path, fail: Callable[[str, int], None] = lambda action, pid: None) -> None:
        self.states: dict[int, str] = {}
        self.actions: list[tuple[str, int]] = []
        self.gpus: dict[int, Mapping[str, str]] = {}
        self._proc = proc
        self._fail = fail
        self._lock = threading.Lock()

    def open_gpu(self, pid: int, *, threads: tuple[str, ...] = ("python3",), **environment: str) -> int:
        """Let the process use CUDA."""
        folder = self._proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "fd" / "0").symlink_to("/dev/null")
        (folder / "fd" / "9").symlink_to("/dev/nvidia0")
        (folder / "comm").write_text("python3\n")
        (folder / "environ").write_text("".join(f"{name}={value}\0" for name, value in environment.items()))
        for number, thread in enumerate(threads):
            (folder / "task" / str(pid + number)).mkdir(parents=True)
            (folder / "task" / str(pid + number) / "comm").write_text(f"{thread}\n")
        self.states[pid] = "running"
        return pid

    def state(self, pid: int) -> CudaState:
        if pid not in self.states:
            raise DriverError("no CUDA process")
        return CudaState(self.states[pid])

    def lock(self, pid: int, limit_ms: int) -> None:
        assert limit_ms > 0
        self._do("lock", pid)

    def checkpoint(self, pid: int) -> None:
        self._do("checkpoint", pid)
        (self._proc / str(pid) / "fd" / "9").unlink()

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        self._do("restore", pid)
        self.gpus[pid] = gpus
        (self._proc / str(pid) / "fd" / "9").symlink_to("/dev/nvidia0")

    def unlock(self, pid: int) -> None:
        self._do("unlock", pid)

    def _do(self, action: str, pid: int) -> None:
        self._fail(action, pid)
        with self._lock:
            self.actions.append((action, pid))
            after = _AFTER.get((action, self.states[pid]))
            if after is None:
                raise DriverError(f"cannot {action} a process that is {self.states[pid]}")
            self.states[pid] = after


def install_tool(folder: Path) -> Path:
    """Write the program `cuda-checkpoint` to the folder."""
    path = folder / "cuda-checkpoint"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    path.chmod(0o755)
    return path


def main() -> None:
    """What `cuda-checkpoint` does."""
    words = sys.argv[1:]
    given = dict(zip(words[::2], words[1::2], strict=False)) if words[0] == "--action" else {"--pid": words[2]}
    path = Path(os.environ[STATES]) / given["--pid"]
    if not path.exists():
        sys.exit(f"Could not find CUDA in process ID {given['--pid']}")
    state = path.read_text()
    if words[0] == "--get-state":
        print(state)
        return
    after = _AFTER.get((given["--action"], state))
    if after is None:
        sys.exit(f"cannot {given['--action']} a process that is {state}")
    if (path.parent / "signals").exists() and given["--action"] in {"checkpoint", "restore"}:
        is_away = given["--action"] == "checkpoint"
        pid = int(given["--pid"])
        os.kill(pid, signal.SIGUSR1 if is_away else signal.SIGUSR2)
        while (gpu_users([pid]) == []) != is_away:
            if not os.listdir(f"/proc/{pid}/fd"):
                sys.exit(f"process ID {pid} has ended")
            time.sleep(0.001)
    path.write_text(after)


if __name__ == "__main__":
    main()
