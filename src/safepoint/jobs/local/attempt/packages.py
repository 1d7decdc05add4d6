"""Packages that a job wants: installed into a folder of its own, in front of the machine's."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from safepoint.errors import SafepointError
from safepoint.foundation.processes import JOB_VARIABLE
from safepoint.jobs.model.spec import JobSpec

_POLL_S = 0.1


class NotWantedError(Exception):
    """The job is not to run any more."""


def install_packages(spec: JobSpec, folder: Path, *, is_wanted: Callable[[], bool] = lambda: True) -> Path | None:
    """Install what the job names, unless that was done before.

    Args:
        spec: the job.
        folder: the job's; pip counts as one of its processes.
        is_wanted: asked again and again whether to go on: packages may take many minutes.

    Returns:
        The folder to look into first; None when the job names nothing.

    Raises:
        SafepointError: pip failed; its words are in `logs/packages.log`.
        NotWantedError: `is_wanted` said no; nothing is left.
    """
    if not spec.packages:
        return None
    wish = hashlib.sha256(repr((spec.packages, spec.package_indexes, spec.python)).encode()).hexdigest()[:12]
    target = folder / f"packages-{wish}"
    if target.exists():
        return target
    unfinished = target.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    log = folder / "logs" / "packages.log"
    log.parent.mkdir(exist_ok=True)
    options = ["--target", str(unfinished), *_index_options(spec.package_indexes)]
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [spec.python, "-m", "pip", "install", *options, "--", *spec.packages],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={**os.environ, JOB_VARIABLE: str(folder)},
            start_new_session=True,
        )
        try:
            _wait(process, is_wanted)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # what it builds with, too
                process.wait()
            if process.returncode != 0:
                shutil.rmtree(unfinished, ignore_errors=True)
    if process.returncode != 0:
        raise SafepointError(f"installing {' '.join(spec.packages)} failed", hint=f"see {log}")
    unfinished.rename(target)
    return target


def _wait(process: "subprocess.Popen[bytes]", is_wanted: Callable[[], bool]) -> None:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            return
        if not is_wanted():
            raise NotWantedError


def _index_options(urls: tuple[str, ...]) -> list[str]:
    options: list[str] = []
    for position, url in enumerate(urls):
        options += ["--index-url" if position == 0 else "--extra-index-url", url]
    return options
