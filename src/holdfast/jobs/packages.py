"""Packages that a job wants: installed into a folder of its own, in front of the machine's."""

import hashlib
import shutil
import subprocess
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.jobs.spec import JobSpec


def install_packages(spec: JobSpec, folder: Path) -> Path | None:
    """Install what the job names, unless that was done before.

    Returns:
        The folder to look into first; None when the job names nothing.

    Raises:
        HoldfastError: pip failed; its words are in `logs/packages.log`.
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
        done = subprocess.run(
            [spec.python, "-m", "pip", "install", *options, "--", *spec.packages],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            check=False,
        )
    if done.returncode != 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise HoldfastError(f"installing {' '.join(spec.packages)} failed", hint=f"see {log}")
    unfinished.rename(target)
    return target


def _index_options(urls: tuple[str, ...]) -> list[str]:
    options: list[str] = []
    for position, url in enumerate(urls):
        options += ["--index-url" if position == 0 else "--extra-index-url", url]
    return options


__all__ = ["install_packages"]
