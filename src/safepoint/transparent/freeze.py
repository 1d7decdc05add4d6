"""Freezes one process tree into an image.

Promises: either the image is committed, or the processes run on and nothing is left of it, also if Safepoint is
killed. Everything that can be known before is checked before a process is stopped.
"""

import os
import platform
import signal
from collections.abc import Callable
from dataclasses import dataclass

from safepoint.errors import NotFoundError, UsageError
from safepoint.foundation import clock
from safepoint.transparent.criu import tree_dump
from safepoint.transparent.criu.guard import Guard
from safepoint.transparent.criu.obstacles import refuse_obstacles
from safepoint.transparent.criu.program import Criu
from safepoint.transparent.criu.trees import held, name_of, processes_of, resident_bytes, send
from safepoint.transparent.cuda.host_copy import gpu_memory_in_host
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.manifest import ImageManifest, Machine
from safepoint.transparent.images.store_dump import Dump, store_dumps
from safepoint.transparent.packages import require_packages
from safepoint.transparent.staging import staging

LOG_NAME = "criu-dump.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """An image that was made.

    Args:
        manifest: its manifest.
        frozen_s: how long CRIU and the CUDA driver took; the processes were frozen for nearly all of this time.
        is_in_memory: whether the raw pages were written to memory first; otherwise to a disk, which takes longer.
    """

    manifest: ImageManifest
    frozen_s: float
    is_in_memory: bool


def freeze_tree(
    criu: Criu,
    pid: int,
    location: ImageLocation,
    *,
    is_running_after: bool,
    progress: Callable[[int], None] | None = None,
) -> Frozen:
    """Make an image of the process `pid` and all processes below it.

    Args:
        criu: the CRIU to use.
        pid: the root process.
        location: where the image will be. It refers to pages of the newest image there, if that is valid.
        is_running_after: whether the processes run on; otherwise they are ended when the image is committed.
        progress: called with the number of bytes of pages stored since the last call.

    Raises:
        NotFoundError: there is no such process.
        UsageError: this process is in the tree, or others may write to the folder of the location.
        FreezeError: CRIU failed; the processes run on.
        SafepointError, OSError: the image could not be written; the processes run on.
    """
    require_packages()
    tree = processes_of(pid)
    if not tree:
        raise NotFoundError(f"there is no process {pid}; nothing was frozen", hint="name a process that runs")
    if os.getpid() in tree:
        raise UsageError(
            f"process {pid} has started this command, which cannot freeze itself; nothing was frozen",
            hint="run the command in another session",
        )
    refuse_obstacles(tree)
    program, session = name_of(pid), tree_dump.is_outside_led(pid)
    with (
        location.writing() as image,
        gpu_memory_in_host(tree) as gpu_work,
        staging(resident_bytes(tree), image.working) as stage,
        Guard([] if is_running_after else tree, stage.folder) as guard,
    ):
        log = image.working.parent / LOG_NAME
        log.unlink(missing_ok=True)
        tree_dump.dump(criu, pid, stage.folder, log=log, is_running_after=is_running_after, started=guard.started)
        if is_running_after:
            gpu_work.resume()
        frozen_s = clock.monotonic_s() - gpu_work.since_s
        machine = Machine(
            architecture=platform.machine(), kernel=platform.release(), criu=criu.version, gpus=gpu_work.gpus
        )
        dumped = Dump(folder=stage.folder, root_pid=pid, program=program, is_in_session_of_other=session)
        with held([] if is_running_after else processes_of(pid)) as stopped:
            manifest = store_dumps(image, [dumped], machine, parent=location.parent(), progress=progress)
            image.commit(manifest)
            send(signal.SIGKILL, stopped)
        guard.release()
    return Frozen(manifest=manifest, frozen_s=frozen_s, is_in_memory=stage.is_in_memory)
