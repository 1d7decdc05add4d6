"""Restores the processes of an image, all trees at one moment.

The order of the steps: check the whole image, and the images that it needs; restore all trees up to the point where
all processes exist and none runs; let all of them run.

Promises: CRIU is started only after everything was checked, and the files from which it restores are byte for byte
the files that it had written. Either all trees run or none, even if Safepoint or CRIU is killed.
"""

import contextlib
import os
import platform
import signal
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from safepoint.errors import FreezeError, ImageError
from safepoint.foundation.processes import tree_of
from safepoint.foundation.temporary_folders.places import private_parent
from safepoint.transparent.carried import set_down
from safepoint.transparent.criu.gate import folder_for_scripts
from safepoint.transparent.criu.guard import Guard
from safepoint.transparent.criu.program import Criu
from safepoint.transparent.criu.records import users_of
from safepoint.transparent.criu.tree_dump import Restored, TreeRestore
from safepoint.transparent.criu.trees import held, send
from safepoint.transparent.cuda.host_copy import places_on_this_machine, resume_restored
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.manifest import Part
from safepoint.transparent.images.materialise import materialise, raw_bytes, verify
from safepoint.transparent.images.names import part_name
from safepoint.transparent.packages import require_packages
from safepoint.transparent.planted import refuse_planted_files, refuse_planted_paths
from safepoint.transparent.secret_folders import secret_folder
from safepoint.transparent.staging import staging

LOG_NAME = "criu-restore-{}.log"


def thaw_image(
    criu: Criu,
    location: ImageLocation,
    name: str,
    *,
    before_start: Callable[[Sequence[Restored]], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Restored]:
    """Restore the processes of an image, and return when they run.

    Args:
        criu: the CRIU to use.
        location: where the image is.
        name: the image.
        before_start: called with the restored trees before they run. If it raises an exception, the trees are ended.
        progress: called with the number of bytes of pages restored since the last call.

    Returns:
        The trees, in the order of the image's parts.

    Raises:
        UsageError: another user may have written the image.
        ImageError: the image is damaged, or was made on a machine with another kind of processor.
        FreezeError: CRIU or the CUDA driver could not restore the processes, or they would use a file that another
            user has made; no process runs.
        UnsupportedError: the processes used a GPU, and this machine cannot restore its memory; or no program can be
            executed in any temporary folder.
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
    places = places_on_this_machine(manifest.machine.gpus)
    control = location.control_folder()
    with (
        staging(raw_bytes(manifest), control) as stage,
        Guard(stage.folder, signal.SIGKILL) as guard,
        secret_folder(folder_for_scripts((stage.folder, control, private_parent())), "safepoint-gate-") as gates,
        contextlib.ExitStack() as folders,
        contextlib.ExitStack() as tidying,
    ):
        materialise(location, name, stage.pages, progress=progress)
        for number in range(len(manifest.parts)):
            part = stage.pages / part_name(number)
            users = users_of(part)
            folders.enter_context(set_down(part, users))
            for folder in refuse_planted_files(part, users):
                tidying.callback(_delete_empty, folder)
        with _restored(criu, stage.pages, gates, control, manifest.parts) as restored:
            pids = [pid for one in restored for pid in tree_of(one.pid)]
            for pid in pids:
                guard.watch(pid)
            refuse_planted_paths(pids)
            if before_start is not None:
                before_start(restored)
            guard.then(signal.SIGCONT)
            with held(pids) as processes:
                send(signal.SIGCONT, processes)
            if manifest.machine.gpus:
                _resume_gpus(pids, places)
        guard.release()
    return restored


def _delete_empty(folder: str) -> None:
    """Delete a folder, unless something is in it."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _resume_gpus(processes: Sequence[int], places: dict[str, str]) -> None:
    try:
        resume_restored(processes, places)
    except FreezeError as error:
        raise FreezeError(f"{error.message}; the restored processes were ended", hint=error.hint) from error


@contextlib.contextmanager
def _restored(criu: Criu, pages: Path, gates: Path, logs: Path, parts: Sequence[Part]) -> Generator[list[Restored]]:
    """Restore all trees. In the `with` block they are stopped, and an exception ends them."""
    begun: list[TreeRestore] = []
    try:
        for number, part in enumerate(parts):
            name, log = part_name(number), logs / LOG_NAME.format(number)
            log.unlink(missing_ok=True)
            session = part.is_in_session_of_other
            begun.append(TreeRestore(criu, pages / name, gates / name, log=log, is_in_session_of_other=session))
        for one in begun:
            one.wait()
        for one in begun:
            one.go_on()
        yield [one.restored() for one in begun]
    except BaseException:
        for one in begun:
            one.give_up()
        raise
    for one in begun:
        one.finish()
