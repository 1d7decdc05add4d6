"""Finds CRIU on this machine, and runs it.

CRIU before 4.2 cannot dump TCP sockets on kernel 6.18, and even older releases fail on kernel 6.13 and newer. All
these releases are refused before anything is frozen. `/etc/criu/default.conf` is ignored, so that images do not
depend on it.
"""

import contextlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safepoint.errors import FreezeError, UnsupportedError
from safepoint.transparent.criu.admission import only_for
from safepoint.transparent.criu.messages import explain

VARIABLE = "SAFEPOINT_CRIU"
"""The variable with the path of CRIU, if this is not the `criu` in PATH."""
LEAST_VERSION = (4, 2)
_VERSION = re.compile(r"Version:\s*v?(([0-9]{1,4})\.([0-9]{1,4})[0-9A-Za-z.~+-]{0,40})")
_ANSWER_S = 10.0
_INSTALL = "install CRIU 4.2 or newer, and name it with SAFEPOINT_CRIU if it is not in PATH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Criu:
    """A CRIU that can be used.

    Args:
        path: the program.
        version: its version, such as `4.2.1`.
    """

    path: str
    version: str

    def run(
        self,
        action: str,
        arguments: Sequence[str],
        *,
        folder: Path,
        log: Path,
        pids: Sequence[int] = (),
        started: Callable[[int], None] | None = None,
        inside: Sequence[str] = (),
    ) -> None:
        """Run CRIU, and wait for its end.

        Args:
            action: `dump` or `restore`.
            arguments: its further arguments.
            folder: the folder of its images.
            log: the file for its log.
            pids: the processes that CRIU dumps; no other process can connect to CRIU.
            started: called with the number of CRIU's process as soon as it runs.
            inside: a command that runs another command in the namespaces where CRIU has to run.

        Raises:
            FreezeError: CRIU failed.
        """
        # The output goes to a file, not to a pipe. If CRIU is killed, processes that it has started may hold a pipe
        # open.
        with tempfile.TemporaryFile() as output, open_folder(folder) as images:
            command = [*inside, *self.command(action, arguments, images=images, log=log)]

            def start() -> "subprocess.Popen[bytes]":
                # Ctrl-C reaches the whole process group, and must not end CRIU while it dumps a process.
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                    pass_fds=[images],
                )
                if started is not None:
                    started(process.pid)
                return process

            with only_for(pids) as guarded, guarded(start) as process:
                pass
            if process.returncode != 0:
                output.seek(0)
                raise failure(action, log, process.returncode, output.read().decode(errors="replace"))

    def command(self, action: str, arguments: Sequence[str], *, images: int, log: Path) -> list[str]:
        """The command that `run` runs, as a child process that inherits the descriptor `images`."""
        # The path of the folder may be valid in this process only.
        fixed = ["--no-default-config", "--images-dir", f"/proc/self/fd/{images}", "--log-file", str(log), "-v2"]
        # The control groups of the dumped processes may not exist where they are restored.
        fixed.append("--manage-cgroups=ignore")
        if action == "restore":
            # Kubernetes lets the `fsGroup` of a pod write to all files of a volume whenever it mounts the volume.
            fixed.append("--skip-file-rwx-check")
        return [self.path, action, *fixed, "--tcp-established", "--file-locks", *arguments]


@contextlib.contextmanager
def open_folder(path: Path) -> Generator[int]:
    """Open a folder for CRIU."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def failure(action: str, log: Path, exit_code: int, output: str = "") -> FreezeError:
    """The error for a CRIU that failed.

    Args:
        action: `dump` or `restore`.
        log: its log.
        exit_code: its exit code; negative for a signal.
        output: what it printed, which is used if there is no log.
    """
    done = "the processes run on, and no image was made" if action == "dump" else "nothing was restored"
    if exit_code < 0:
        return FreezeError(f"CRIU was ended by signal {-exit_code}; {done}", hint="try again")
    try:
        text = log.read_text(errors="replace")
    except OSError:
        text = ""
    reason, hint = explain(text or output)
    return FreezeError(f"CRIU could not {action} the processes: {reason}; {done}", hint=hint)


def is_promising() -> bool:
    """Whether `find_criu` may find a usable CRIU. This check is fast, because it does not call CRIU."""
    return os.geteuid() == 0 and bool(os.environ.get(VARIABLE) or shutil.which("criu"))


def find_criu(named: str | None = None) -> Criu:
    """Find a CRIU that this process can use.

    Args:
        named: its path; None for the path in the variable SAFEPOINT_CRIU or, if it is not set, the `criu` in PATH.

    Raises:
        UnsupportedError: there is no CRIU, CRIU is too old, or this process is not root.
    """
    if platform.system() != "Linux":
        raise UnsupportedError("process images need Linux; nothing was frozen", hint="run the command on Linux")
    path = named or os.environ.get(VARIABLE) or shutil.which("criu")
    if path is None:
        raise UnsupportedError("CRIU is not installed; nothing was done", hint=_INSTALL)
    version = version_of(path)
    if os.geteuid() != 0:
        raise UnsupportedError(
            "freezing and restoring processes needs root; nothing was done", hint="run the command as root"
        )
    return Criu(path=path, version=version)


def version_of(path: str) -> str:
    """The version of the CRIU at `path`.

    Raises:
        UnsupportedError: CRIU does not answer, or is too old.
    """
    try:
        answer = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_ANSWER_S
        )
        found = _VERSION.search(answer.stdout.decode(errors="replace"))
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no answer within {_ANSWER_S:.0f} s"
        raise UnsupportedError(f"{path} does not work: {reason}; nothing was done", hint=_INSTALL) from error
    if found is None:
        raise UnsupportedError(f"{path} does not say which version of CRIU it is; nothing was done", hint=_INSTALL)
    if (int(found[2]), int(found[3])) < LEAST_VERSION:
        raise UnsupportedError(
            f"{path} is CRIU {found[1]}, which fails on current kernels; nothing was done", hint=_INSTALL
        )
    return found[1]
