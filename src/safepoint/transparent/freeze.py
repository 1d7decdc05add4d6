"""Freezes process trees into one image, all at the same moment.

The order of the steps: check for all known obstacles; stop all processes; dump all trees. Then either let the
processes run on, or keep them stopped, commit the image, and end them.

Promises: either the image is committed, or the processes run on and nothing is left of the image, even if Safepoint,
CRIU or one of the processes is killed.
"""

import contextlib
import itertools
import os
import platform
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from safepoint.errors import NotFoundError, UsageError
from safepoint.foundation import clock
from safepoint.foundation.processes import name_of, number_inside, tree_of
from safepoint.transparent.carried import carry
from safepoint.transparent.criu import tree_dump
from safepoint.transparent.criu.connections import end_repair
from safepoint.transparent.criu.guard import Guard
from safepoint.transparent.criu.obstacles import refuse_connecting, refuse_obstacles
from safepoint.transparent.criu.program import Criu
from safepoint.transparent.criu.stopping import refuse_stopped, stopped_trees
from safepoint.transparent.criu.trees import held, kill, resident_bytes, send
from safepoint.transparent.cuda.host_copy import gpu_memory_in_host
from safepoint.transparent.images.location import ImageLocation, NewImage
from safepoint.transparent.images.manifest import ImageManifest, Machine
from safepoint.transparent.images.names import part_name
from safepoint.transparent.images.store_dump import Dump, store_dumps
from safepoint.transparent.packages import require_packages
from safepoint.transparent.staging import staging

LOG_NAME = "criu-dump-{}.log"
_FIRST = 1
_INTERRUPTED_S = 10.0
"""How long CRIU may continue after Ctrl-C. If CRIU is killed, a process that it is dumping may crash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """An image that was made.

    Args:
        manifest: its manifest.
        frozen_s: for how many seconds the CUDA driver and signals kept the processes frozen, until they ran on or
            were dumped.
        is_in_memory: whether the raw pages were written to memory first. If False, they were written to a disk first,
            which takes longer.
    """

    manifest: ImageManifest
    frozen_s: float
    is_in_memory: bool


def freeze_trees(
    criu: Criu,
    roots: Sequence[int],
    location: ImageLocation,
    *,
    is_running_after: bool,
    carried: Mapping[int, Sequence[Path]] | None = None,
    before_end: Callable[[ImageManifest], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Frozen:
    """Make an image of processes and all processes below them.

    Args:
        criu: the CRIU to use.
        roots: the root processes; the image has a part for each, in this order. If two processes are connected, both
            must belong to these trees.
        location: where the image will be. The new image refers to pages of the newest image there, if that image is
            valid.
        is_running_after: whether the processes run on. If False, they are ended when the image is committed.
        carried: root process → the temporary folders that are restored with this process.
        before_end: called when the image is committed, before the processes are ended. If it raises an exception, the
            processes run on. It is not called if `is_running_after`.
        progress: called with the number of bytes of pages stored since the last call.

    Raises:
        NotFoundError: a process does not exist.
        UsageError: this process is in a tree, a tree is in another tree, a root is the first process of this machine
            or container, or others may write to the folder of the location.
        FreezeError: CRIU or the CUDA driver failed, or a process has something that cannot be frozen; the processes
            run on, or wait until the driver can restore their GPU memory.
        SafepointError, OSError: the image could not be written; the processes run on.
    """
    require_packages()
    trees = {root: _tree_of(root) for root in roots}
    everything = list(itertools.chain.from_iterable(trees.values()))
    _refuse_overlap(trees)
    refuse_stopped(everything)
    refuse_obstacles(everything)
    with (
        location.writing() as image,
        gpu_memory_in_host(everything) as gpu_work,
        staging(resident_bytes(everything), image.working) as stage,
        Guard(stage.folder, signal.SIGCONT) as guard,
    ):
        with stopped_trees(roots, stopping=guard.watch) as stopped:
            processes = stopped.values()
            try:
                refuse_connecting(stopped)
                dumps = _dump(criu, roots, stage.pages, image, guard)
                for root, dump in zip(roots, dumps, strict=True):
                    carry((carried or {}).get(root, ()), dump.folder)
                if is_running_after:
                    send(signal.SIGCONT, processes)
                    guard.forget()
                    gpu_work.resume()
                frozen_s = clock.monotonic_s() - gpu_work.since_s
                machine = Machine(
                    architecture=platform.machine(), kernel=platform.release(), criu=criu.version, gpus=gpu_work.gpus
                )
                manifest = store_dumps(image, dumps, machine, parent=location.parent(), progress=progress)
                image.commit(manifest)
                if not is_running_after:
                    if before_end is not None:
                        before_end(manifest)
                    guard.then(signal.SIGKILL)
            except BaseException:
                end_repair(stopped)
                send(signal.SIGCONT, processes)
                raise
            if not is_running_after:
                kill(processes)
        guard.release()
    return Frozen(manifest=manifest, frozen_s=frozen_s, is_in_memory=stage.is_in_memory)


def _tree_of(root: int) -> list[int]:
    if root == _FIRST:
        raise UsageError(
            f"process {root} is the first process of this machine or container, and the processes in it cannot stop "
            "their first process; nothing was frozen",
            hint="let another process start the program, as `podman run --init` does, and name the program's process",
        )
    tree = tree_of(root)
    if not tree:
        raise NotFoundError(f"there is no process {root}; nothing was frozen", hint="name a process that runs")
    if os.getpid() in tree:
        raise UsageError(
            f"process {root} has started this command, and the command cannot freeze itself; nothing was frozen",
            hint="run the command in another session",
        )
    return tree


def _refuse_overlap(trees: Mapping[int, Sequence[int]]) -> None:
    for root in trees:
        for other, tree in trees.items():
            if other != root and root in tree:
                raise UsageError(
                    f"process {root} is below process {other}; nothing was frozen", hint=f"name {other} only"
                )


def _dump(criu: Criu, roots: Sequence[int], pages: Path, image: NewImage, guard: Guard) -> list[Dump]:
    """Dump all trees at once. If a dump fails, wait for the others, because each CRIU has to undo its changes to
    its processes."""
    stack = contextlib.ExitStack()
    running: list[int] = []
    """A pidfd of each CRIU: when a CRIU has ended, another process may get its number."""
    is_over = threading.Event()
    """Set when the CRIUs were killed. A signal may arrive before all of them have started."""

    def dump(number: int, root: int) -> Dump:
        folder = pages / part_name(number)
        log = image.working.parent / LOG_NAME.format(number)
        log.unlink(missing_ok=True)
        program, session = name_of(root), tree_dump.is_outside_led(root)
        tree_dump.dump(criu, root, folder, log=log, started=started)
        return Dump(
            folder=folder,
            root_pid=number_inside(root),
            program=program,
            is_in_session_of_other=session,
        )

    def started(pid: int) -> None:
        own = stack.enter_context(held([pid]))
        running.extend(own)
        guard.started(pid)
        if is_over.is_set():
            kill(own)

    for number in range(len(roots)):
        (pages / part_name(number)).mkdir(0o700)
    with stack, ThreadPoolExecutor(max_workers=len(roots)) as pool:
        tasks: list[Future[Dump]] = []
        try:
            tasks += (pool.submit(dump, number, root) for number, root in enumerate(roots))
            return [task.result() for task in tasks]
        except BaseException as error:
            if not isinstance(error, Exception):  # such as Ctrl-C: the `with` block would wait for CRIU without end
                wait(tasks, _INTERRUPTED_S)
                is_over.set()
                kill(running)
            raise
