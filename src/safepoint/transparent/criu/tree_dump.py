"""Dumps one process tree with CRIU, and restores it.

A restored process has the same number as before. If a process of this machine has one of these numbers, the tree is
restored in a new PID namespace, where all numbers are free. The namespace ends when its first process, CRIU, is
killed. To dump the tree once more, CRIU enters this namespace: from outside, it dumps only whole namespaces.

CRIU does not have to lock the network, because the caller has stopped both ends of each connection between the trees.
So CRIU leaves no rule of a firewall behind. After a dump, the processes are still stopped. After a restore, they are
stopped, too.
"""

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safepoint.errors import FreezeError, UnsupportedError
from safepoint.foundation import clock
from safepoint.foundation.processes import identify, number_inside, tree_of
from safepoint.transparent.criu.gate import Gate
from safepoint.transparent.criu.namespaces import first_process_of
from safepoint.transparent.criu.program import Criu, failure, open_folder
from safepoint.transparent.criu.trees import awaited_lock, held, kill

_CORE = re.compile(r"core-([0-9]+)\.img")
_LOOK_S = 0.005
_LOOK_AT_LOCKS_S = 0.5
_LOCKED_S = 5.0
"""How long a restore may wait for the lock of a file. Another user who may read the file can hold this lock
for ever."""
_ENDING_S = 5.0
"""How long CRIU may take to end what it has restored. It does not end while it waits for a lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A process tree that was restored.

    Args:
        pid: the number of its root process on this machine.
        in_namespace: whether it is in a PID namespace of its own, where its processes have the same numbers as
            before.
    """

    pid: int
    in_namespace: bool


def dump(criu: Criu, pid: int, folder: Path, *, log: Path, started: Callable[[int], None] | None = None) -> None:
    """Write the images of a stopped process tree to `folder`. The processes stay stopped.

    Args:
        criu: the CRIU to use.
        pid: the root process.
        folder: an empty folder.
        log: the file for CRIU's log.
        started: see `Criu.run`.

    Raises:
        FreezeError: CRIU failed, or the processes are in namespaces in which other programs may be root; the
            processes are still stopped.
        UnsupportedError: this machine lacks a program of util-linux.
    """
    session = _shell_job(is_outside_led(pid))
    arguments = ["--leave-running", "--network-lock", "skip", "--skip-in-flight", *session]
    number, inside = number_inside(pid), list[str]()
    if number not in {1, pid}:
        _require("nsenter", what="a freeze")
        inside = ["nsenter", f"--target={first_process_of(pid)}", "--pid", "--mount"]
    tree = ["--tree", str(number if inside else pid)]
    pids = tree_of(pid)
    criu.run("dump", [*tree, *arguments], folder=folder, log=log, pids=pids, started=started, inside=inside)


class TreeRestore:
    """A process tree that CRIU restores. Call `wait`, `go_on`, `restored` and `finish`, or `give_up` at any time.

    Args:
        criu: the CRIU to use.
        folder: the folder that `dump` has written.
        gate: the path of a new folder, in which programs can be executed; see `folder_for_scripts`.
        log: the file for CRIU's log.
        is_in_session_of_other: whether the leader of the tree's session was a process outside of the tree.

    Raises:
        UnsupportedError: this machine lacks a program of util-linux.
    """

    def __init__(self, criu: Criu, folder: Path, gate: Path, *, log: Path, is_in_session_of_other: bool) -> None:
        self._log = log
        self._numbers = [int(match[1]) for path in folder.iterdir() if (match := _CORE.fullmatch(path.name))]
        self._in_namespace = any(Path(f"/proc/{number}").exists() for number in self._numbers)
        namespace: list[str] = []
        _require("flock", what="a restore")
        if self._in_namespace:
            _require("unshare", what="a restore")
            # CRIU leads a session in the namespace: a leader outside of the namespace would have no number in it.
            namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "setsid"]
        gate.mkdir(0o700)
        self._gate = Gate(gate)
        arguments = ["--action-script", str(self._gate.script), *_shell_job(is_in_session_of_other)]
        if not self._in_namespace:
            arguments.append("--restore-detached")
        self._output = gate / "output"
        with self._output.open("wb") as output, open_folder(folder) as images:
            self._process = subprocess.Popen(
                [*namespace, *criu.command("restore", arguments, images=images, log=log)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=self._in_namespace,
                process_group=None if self._in_namespace else 0,
                pass_fds=[images],
            )
        self._identity = identify(self._process.pid)
        self._look_at_locks_s = 0.0
        self._locked_s: float | None = None

    def wait(self) -> None:
        """Wait until all processes exist. None of them runs yet.

        Raises:
            FreezeError: CRIU failed; call `give_up`.
        """
        while self._gate.restored() is None:
            self._look()

    def go_on(self) -> None:
        """Let CRIU complete the restore."""
        self._gate.open()

    def restored(self) -> Restored:
        """Wait until the restore is complete. The processes are as they were dumped: stopped.

        The caller lets them continue, and then calls `finish`.

        Raises:
            FreezeError: CRIU failed; call `give_up`.
        """
        while not self._gate.is_passed:
            self._look()
        if not self._in_namespace:
            return Restored(pid=self._gate.restored() or 0, in_namespace=False)
        tree = tree_of(self._process.pid)
        if len(tree) < 3:  # `unshare`, CRIU, and the root of the tree
            raise FreezeError("the restored processes ended at once", hint="look into the output of the program")
        return Restored(pid=tree[2], in_namespace=True)

    def finish(self) -> None:
        """Let CRIU end. In a namespace, CRIU ends when the processes end."""
        self._gate.close()
        if self._in_namespace:
            threading.Thread(target=self._process.wait, name="safepoint-namespace", daemon=True).start()
        else:
            self._process.wait()

    def _look(self) -> None:
        """Wait for a moment.

        Raises:
            FreezeError: CRIU has ended too early, or waits for a lock that another program holds.
        """
        clock.sleep(_LOOK_S)
        self._look_at_locks()
        code = self._process.poll()
        if code is not None and not self._gate.is_passed:
            raise failure("restore", self._log, code, self._output.read_text(errors="replace"))

    def _look_at_locks(self) -> None:
        now_s = clock.monotonic_s()
        if now_s < self._look_at_locks_s:
            return
        self._look_at_locks_s = now_s + _LOOK_AT_LOCKS_S
        path = awaited_lock(tree_of(self._process.pid))
        if path is None:
            self._locked_s = None
            return
        self._locked_s = now_s if self._locked_s is None else self._locked_s
        if now_s - self._locked_s >= _LOCKED_S:
            raise FreezeError(
                f"a process had locked {path}, and another program holds a lock on it now; nothing was restored",
                hint=f"`fuser {path}` shows the program; end it, and try again",
            )

    def give_up(self) -> None:
        """End everything that CRIU has restored."""
        self._gate.close()
        if self._in_namespace:
            self._process.kill()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if not self._in_namespace:
            # If CRIU was killed, restored processes are left. Their numbers were free when CRIU started.
            with held(number for number in self._numbers if self._is_newer(number)) as processes:
                kill(processes)

    def _is_newer(self, number: int) -> bool:
        found = identify(number)
        return found is not None and self._identity is not None and found.start_ticks >= self._identity.start_ticks


def is_outside_led(pid: int) -> bool:
    """Whether the leader of the session of `pid` is not `pid` itself. CRIU has to know that for dump and restore."""
    try:
        return os.getsid(pid) != pid
    except ProcessLookupError:
        return False


def _require(program: str, *, what: str) -> None:
    if shutil.which(program) is None:
        raise UnsupportedError(
            f"the program `{program}`, which {what} needs, is not installed; nothing was done",
            hint="install util-linux",
        )


def _shell_job(is_needed: bool) -> list[str]:
    return ["--shell-job"] if is_needed else []
