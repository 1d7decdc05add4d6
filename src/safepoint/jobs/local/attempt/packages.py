"""Installs the packages of a job into a folder from which the job's ranks import first."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safepoint.errors import SafepointError
from safepoint.jobs.local.attempt.steps import run_step
from safepoint.jobs.model.spec import JobSpec

_LOG = "packages.log"


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
    # The name is fixed, so that the next attempt deletes the folder of a killed attempt.
    unfinished = target.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    options = ["--target", str(unfinished)]
    for position, url in enumerate(spec.package_indexes):
        options += ["--index-url" if position == 0 else "--extra-index-url", url]
    command = [spec.python, "-P", "-m", "pip", "install", *options, "--", *spec.packages]
    code = None
    try:
        code = run_step(command, folder, _LOG, os.environ, may_continue)
    finally:
        if code != 0:
            shutil.rmtree(unfinished, ignore_errors=True)
    if code != 0:
        raise SafepointError(f"installing {' '.join(spec.packages)} failed", hint=f"see {folder / 'logs' / _LOG}")
    unfinished.rename(target)
    return target
