"""Runs the programs that prepare a job before its launchers start."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safepoint.foundation import clock
from safepoint.foundation.processes import JOB_VARIABLE

_POLL_S = 0.1


class JobStoppedError(Exception):
    """The program was ended, because the job has to stop."""


def run_step(
    command: Sequence[str], folder: Path, log: str, environ: Mapping[str, str], may_continue: Callable[[], bool]
) -> int:
    """Run a program until it ends, and return its exit code.

    Args:
        command: the program and its arguments.
        folder: the folder of the job; the program counts as one of the job's processes.
        log: the name of the file, in the job's folder of logs, to which the output of the program is appended.
        environ: the environment of the program.
        may_continue: called repeatedly; when it returns False, the program and its children are killed.

    Raises:
        JobStoppedError: `may_continue` returned False.
    """
    path = folder / "logs" / log
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={**environ, JOB_VARIABLE: str(folder)},
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                if not may_continue():
                    raise JobStoppedError
                clock.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                # Also kills the children of the program, such as the build processes of pip.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return process.returncode
