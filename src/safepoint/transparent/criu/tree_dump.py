"""Dumps one process tree with CRIU, and restores it.

A restored process has the number that it had. If a process of this machine has one of these numbers, the tree is
restored in a new PID namespace, where all numbers are free. It ends when the first process of the namespace, CRIU, is
killed.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safepoint.errors import FreezeError, UnsupportedError
from safepoint.foundation import clock
from safepoint.transparent.criu.program import Criu, failure
from safepoint.transparent.criu.trees import processes_of

_CORE = re.compile(r"core-([0-9]+)\.img")
_DONE = "Restore finished successfully"
_LOOK_S = 0.02
_PID_FILE = "restored.pid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A process tree that runs again.

    Args:
        pid: the number of its root process on this machine.
        in_namespace: whether it is in a PID namespace of its own, where its processes have the numbers that they had.
    """

    pid: int
    in_namespace: bool


def dump(
    criu: Criu,
    pid: int,
    folder: Path,
    *,
    log: Path,
    is_running_after: bool,
    started: Callable[[int], None] | None = None,
) -> None:
    """Write the images of a process tree to `folder`.

    Args:
        criu: the CRIU to use.
        pid: the root process.
        folder: an empty folder.
        log: the file for CRIU's log.
        is_running_after: whether the processes run on as soon as CRIU has written everything; otherwise they stay
            stopped (SIGSTOP), so that the caller can end them, or let them run on (SIGCONT).
        started: see `Criu.run`.

    Raises:
        FreezeError: CRIU failed; the processes run on.
    """
    after = "--leave-running" if is_running_after else "--leave-stopped"
    arguments = ["--tree", str(pid), after, *_shell_job(is_outside_led(pid))]
    criu.run("dump", arguments, folder=folder, log=log, started=started)


def restore(criu: Criu, folder: Path, *, log: Path, is_in_session_of_other: bool) -> Restored:
    """Restore a process tree, and return when it runs.

    Args:
        criu: the CRIU to use.
        folder: the folder that `dump` has written.
        log: the file for CRIU's log.
        is_in_session_of_other: whether the tree was dumped from the session of a process outside of it.

    Raises:
        FreezeError: CRIU failed; nothing was restored.
        UnsupportedError: a number is in use, and this machine has no `unshare`.
    """
    pid_file = folder / _PID_FILE
    pid_file.unlink(missing_ok=True)
    arguments = ["--pidfile", str(pid_file), *_shell_job(is_in_session_of_other)]
    if not _used_numbers(folder):
        criu.run("restore", [*arguments, "--restore-detached"], folder=folder, log=log)
        return Restored(pid=int(pid_file.read_text()), in_namespace=False)
    unshare = shutil.which("unshare")
    if unshare is None:
        raise UnsupportedError(
            "a process of this machine has the number of a process in the image, and the program `unshare`, which "
            "makes a PID namespace, is not installed; nothing was restored",
            hint="install util-linux, or end the process",
        )
    namespace = [unshare, "--pid", "--fork", "--kill-child", "--mount-proc"]
    process = subprocess.Popen(
        [*namespace, *criu.command("restore", arguments, folder=folder, log=log), "-v4"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while _DONE not in (log.read_text(errors="replace") if log.exists() else ""):
        if process.poll() is not None:
            raise failure("restore", log, "")
        clock.sleep(_LOOK_S)
    return Restored(pid=_restored_in(process.pid), in_namespace=True)


def _restored_in(unshare: int) -> int:
    """The root of the restored tree: the child of CRIU, which is the child of `unshare`."""
    tree = processes_of(unshare)
    if len(tree) < 3:
        raise FreezeError("the restored processes ended at once", hint="look into the output of the program")
    return tree[2]


def is_outside_led(pid: int) -> bool:
    """Whether the leader of the session of `pid` is not `pid` itself. CRIU has to know that for dump and restore."""
    try:
        return os.getsid(pid) != pid
    except ProcessLookupError:
        return False


def _shell_job(is_needed: bool) -> list[str]:
    return ["--shell-job"] if is_needed else []


def _used_numbers(folder: Path) -> list[int]:
    numbers = [int(match[1]) for path in folder.iterdir() if (match := _CORE.fullmatch(path.name))]
    return [number for number in numbers if Path(f"/proc/{number}").exists()]
