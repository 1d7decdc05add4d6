"""Freezes and restores a small program, to find out whether processes can be frozen and restored here.

Kernels, containers and file systems can refuse each step, and no version number shows this.
"""

import os
import subprocess

from safepoint.errors import SafepointError, UnsupportedError
from safepoint.foundation.temporary_folders.places import private_parent
from safepoint.transparent.criu.program import Criu, find_criu
from safepoint.transparent.criu.trees import held, kill
from safepoint.transparent.freeze import freeze_trees
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.packages import require_packages
from safepoint.transparent.secret_folders import secret_folder
from safepoint.transparent.thaw import thaw_image

_PROGRAM = ("sleep", "300")


def find_working_criu(output: int | None = None) -> Criu:
    """Find CRIU, and test it.

    Args:
        output: the descriptor to which the frozen processes print; None if they print nothing. CRIU cannot freeze
            some kinds of outputs, such as terminals.

    Raises:
        UnsupportedError: processes cannot be frozen and restored here.
        MissingExtraError: the extra `transparent` is not installed.
    """
    criu = find_criu()
    require_packages()
    try:
        try_out(criu, output)
    except UnsupportedError:
        raise
    except (SafepointError, OSError) as error:
        reason = error.message if isinstance(error, SafepointError) else error.strerror or str(error)
        hint = (error.hint if isinstance(error, SafepointError) else None) or "see `safepoint doctor`"
        raise UnsupportedError(
            f"CRIU {criu.version} cannot freeze and restore a small program here: {reason}", hint=hint
        ) from error
    return criu


def try_out(criu: Criu, output: int | None = None) -> None:
    """Freeze a small program, and restore it.

    Args:
        criu: the CRIU to use.
        output: see `find_working_criu`.

    Raises:
        SafepointError, OSError: the program cannot be frozen and restored.
    """
    with secret_folder(private_parent(prefers_memory=True), "safepoint-trial-") as folder:
        images = ImageLocation(folder / "images")
        out = subprocess.DEVNULL if output is None else output
        with subprocess.Popen(
            _PROGRAM, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/", start_new_session=True
        ) as process:
            try:
                name = freeze_trees(criu, [process.pid], images, is_running_after=False).manifest.name
            finally:
                process.kill()
        [restored] = thaw_image(criu, images, name)
        with held([restored.pid]) as processes:
            kill(processes)


def standard_output() -> int | None:
    """The descriptor of this process's standard output; None if it is closed."""
    try:
        os.fstat(1)
    except OSError:
        return None
    return 1
