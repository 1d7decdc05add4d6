"""Installs the packages of a job into a folder from which the job's ranks import first."""

import hashlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from safepoint.errors import SafepointError
from safepoint.foundation import clock
from safepoint.foundation.processes import JOB_VARIABLE
from safepoint.jobs.model.spec import JobSpec

_POLL_S = 0.1


class JobStoppedError(Exception):
    """The installation was stopped, because the job has to stop."""


def install_packages(spec: JobSpec, folder: Path, *, may_continue: Callable[[], bool] = lambda: True) -> Path | None:
    """Install the packages of the job, unless they are installed already.

    Args:
        spec: the specification of the job.
        folder: the folder of the job; pip counts as one of the job's processes.
        may_continue: called repeatedly; when it returns False, the installation stops.

    Returns:
        The folder with the packages; None when the job has no packages.

    Raises:
        SafepointError: pip failed; its output is in `logs/packages.log`.
        JobStoppedError: `may_continue` returned False; the files were removed.
    """
    if not spec.packages:
        return None
    key = hashlib.sha256(repr((spec.packages, spec.package_indexes, spec.python)).encode()).hexdigest()[:12]
    target = folder / f"packages-{key}"
    if target.exists():
        return target
    unfinished = target.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    log = folder / "logs" / "packages.log"
    log.parent.mkdir(exist_ok=True)
    options = ["--target", str(unfinished)]
    for position, url in enumerate(spec.package_indexes):
        options += ["--index-url" if position == 0 else "--extra-index-url", url]
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [spec.python, "-P", "-m", "pip", "install", *options, "--", *spec.packages],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={**os.environ, JOB_VARIABLE: str(folder)},
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                if not may_continue():
                    raise JobStoppedError
                clock.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # also kills the build processes of pip
                process.wait()
            if process.returncode != 0:
                shutil.rmtree(unfinished, ignore_errors=True)
    if process.returncode != 0:
        raise SafepointError(f"installing {' '.join(spec.packages)} failed", hint=f"see {log}")
    unfinished.rename(target)
    return target
