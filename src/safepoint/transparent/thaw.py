"""Restores the processes of an image.

Promises: CRIU is started only after the whole image was checked, and the images that it needs. What CRIU restores
from is byte for byte what it had written.
"""

import platform
import signal
from collections.abc import Callable

from safepoint.errors import FreezeError, ImageError
from safepoint.transparent.criu import tree_dump
from safepoint.transparent.criu.program import Criu
from safepoint.transparent.criu.tree_dump import Restored
from safepoint.transparent.criu.trees import held, processes_of, send
from safepoint.transparent.cuda.host_copy import places_on_this_machine, resume_restored
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.manifest import part_name
from safepoint.transparent.images.materialise import materialise, raw_bytes, verify
from safepoint.transparent.packages import require_packages
from safepoint.transparent.staging import staging

LOG_NAME = "criu-restore.log"


def thaw_image(
    criu: Criu, location: ImageLocation, name: str, *, progress: Callable[[int], None] | None = None
) -> Restored:
    """Restore the processes of an image, and return when they run.

    Args:
        criu: the CRIU to use.
        location: where the image is.
        name: the image.
        progress: called with the number of bytes of pages restored since the last call.

    Raises:
        UsageError: another user may have written the image.
        ImageError: the image is damaged, or was made on a machine with another kind of processor.
        FreezeError: CRIU or the CUDA driver could not restore the processes.
        UnsupportedError: the processes used a GPU, and this machine cannot restore its memory.
        StorageError: there is too little space for the raw pages.
    """
    require_packages()
    location.check_private(location.read(name))
    manifest = verify(location, name, deep=False)
    if manifest.machine.architecture != platform.machine():
        raise ImageError(
            f"{name} was made on {manifest.machine.architecture}, and this machine is {platform.machine()}; nothing "
            "was restored",
            hint="restore it on a machine of the same kind",
        )
    if len(manifest.parts) != 1:
        raise ImageError(
            f"{name} has {len(manifest.parts)} process trees, and this release restores one; nothing was restored",
            hint="use a newer release of safepoint",
        )
    places = places_on_this_machine(manifest.machine.gpus)
    control = location.control_folder()
    with staging(raw_bytes(manifest), control) as stage:
        materialise(location, name, stage.folder, progress=progress)
        log = control / LOG_NAME
        log.unlink(missing_ok=True)
        session = manifest.parts[0].is_in_session_of_other
        restored = tree_dump.restore(criu, stage.folder / part_name(0), log=log, is_in_session_of_other=session)
    if manifest.machine.gpus:
        tree = processes_of(restored.pid)
        with held(tree) as processes:
            try:
                resume_restored(tree, places)
            except FreezeError as error:
                send(signal.SIGKILL, processes)
                raise FreezeError(f"{error.message}; the restored processes were ended", hint=error.hint) from error
    return restored
