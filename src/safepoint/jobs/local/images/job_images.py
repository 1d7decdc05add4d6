"""Freezes a job of this machine into a process image, and restores its processes.

The launchers of the job are the roots of the frozen process trees. All ranks and keepers are below them. A frozen job
is suspended. `thaw` lets its processes continue in the middle of a step. `resume` does the same, unless there is a
newer checkpoint.
"""

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safepoint.errors import ConflictError, FreezeError, NotFoundError, UsageError, printable
from safepoint.foundation import clock, processes
from safepoint.foundation.files import FolderLock
from safepoint.jobs.local import slots
from safepoint.jobs.local.attempt.launchers import Launchers
from safepoint.jobs.local.history import History
from safepoint.jobs.local.images.last_resort import carried_folders
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.paths import images_of, job_folder, supervisor_lock
from safepoint.jobs.local.supervisor_start import start_supervisor
from safepoint.jobs.model.records import JobRecord, NodeRecord, RequestedAction
from safepoint.jobs.model.states import JobState
from safepoint.transparent.criu.program import Criu, find_criu
from safepoint.transparent.images.names import number_of

if TYPE_CHECKING:
    from safepoint.transparent.freeze import Frozen
    from safepoint.transparent.images.location import ImageLocation
    from safepoint.transparent.images.manifest import ImageManifest
    from safepoint.transparent.thaw import Restored

_EXITS_WITHIN_S = 15.0
_POLL_S = 0.1
FREEZABLE = (JobState.RUNNING, JobState.RESUMING)
"""The states in which a job can be frozen."""


def images_folder(name: str) -> Path:
    """The folder for the images of a job. The folder is deleted with the job.

    Args:
        name: the name of the job, or its first letters.

    Raises:
        NotFoundError: there is no such job.
    """
    with History() as history:
        return images_of(history.name_of(name))


def freeze_job(
    criu: Criu,
    name: str,
    location: "ImageLocation",
    *,
    is_running_after: bool,
    actor: str,
    progress: Callable[[int], None] | None = None,
) -> "Frozen":
    """Make an image of all processes of a job.

    Args:
        criu: the CRIU to use.
        name: the name of the job, or its first letters.
        location: where the image will be, such as in `images_folder`.
        is_running_after: True lets the job continue to run. False suspends the job.
        actor: the user or program that requests it.
        progress: called with the number of bytes of pages stored since the last call.

    Raises:
        NotFoundError: there is no such job.
        ConflictError: the job does not run; or the job was changed after its image was made, and the job continues
            to run.
        FreezeError, SafepointError, OSError: the job could not be frozen, and continues to run.
    """
    from safepoint.transparent.freeze import freeze_trees

    with History() as history:
        job = history.job(name)
        roots = _launchers_of(history, job)

        def note(manifest: "ImageManifest") -> None:
            image = location.where(manifest.name)
            with history.transaction():
                now = history.find(job.name)
                if now is None or _roots_of(history, now) != roots or now.is_to_stop:
                    raise ConflictError(
                        f"job {job.name} was changed while it was frozen. Its processes continue to run, and the "
                        f"image {image} stays",
                        hint=f"see `safepoint events {job.name}`",
                    )
                history.note_image(job.name, image, actor=actor)
                history.request(job.name, RequestedAction.FREEZE, actor=actor)

        frozen = freeze_trees(
            criu,
            roots,
            location,
            is_running_after=is_running_after,
            carried=carried_folders(roots),
            before_end=note,
            progress=progress,
        )
        if is_running_after:
            with history.transaction():
                now = history.find(job.name)
                if now is not None and now.attempt == job.attempt:
                    history.note_image(job.name, location.where(frozen.manifest.name), actor=actor)
            return frozen
    with LocalJobs(actor=actor) as jobs:
        jobs.wait(job.name, [JobState.SUSPENDED], timeout_s=_EXITS_WITHIN_S)
    return frozen


def is_job(word: str) -> bool:
    """Whether a word on the command line means a job, and not an image or a location of images.

    A plain word means a location only if it is a folder with images, or the name of an image.

    Raises:
        UsageError: it means both.
    """
    if "/" in word or word in {".", ".."} or number_of(word) is not None:
        return False
    try:
        has_images = any(number_of(name) is not None for name in os.listdir(word))
    except OSError:
        has_images = False
    if not has_images:
        return True
    with History() as history:
        if word.isascii() and history.knows(word):
            raise UsageError(
                f"{printable(word)} is a job, and a folder with images; nothing was restored",
                hint=f"write ./{printable(word)} for the folder; for the job, run the command in another folder",
            )
    return False


def image_of(name: str) -> tuple[str, str]:
    """The full name of a job that can be thawed, and the path of its image.

    Args:
        name: the name of the job, or its first letters.

    Raises:
        NotFoundError: there is no such job, or its newest attempt has no image.
        ConflictError: the job is active or complete.
    """
    with History() as history:
        job = history.job(name)
        return job.name, _image_of(history, job)


def thaw_job(
    criu: Criu,
    name: str,
    location: "ImageLocation",
    image: str,
    *,
    actor: str,
    progress: Callable[[int], None] | None = None,
) -> "list[Restored]":
    """Restore the processes of a job from its image. Its supervisor watches whether they make progress.

    Args:
        criu: the CRIU to use.
        name: the name of the job, or its first letters.
        location: where the image is.
        image: the name of the image that `image_of` returns.
        actor: the user or program that requests it.
        progress: called with the number of bytes of pages restored since the last call.

    Raises:
        NotFoundError: there is no such job, or its newest attempt has no image.
        ConflictError: the job is active or complete, or its slots are taken.
        SafepointError, OSError: the processes could not be restored; the job is as it was.
    """
    from safepoint.transparent.thaw import thaw_image

    with History() as history:
        job = history.job(name)
        path = _image_of(history, job)
        with contextlib.ExitStack() as starts, _without_supervisor(job):
            _refuse_full(history, job)
            adopt = _adoption(history, job, path, actor, check=lambda: _refuse_full(history, job))
            try:
                return thaw_image(criu, location, image, before_start=adopt, progress=progress)
            finally:
                if history.job(job.name).needs_supervisor:
                    starts.callback(start_supervisor, job.name)


def restore_job(history: History, job: JobRecord, *, actor: str) -> None:
    """Restore the processes of a job from its image. The job's supervisor calls this when it has the job's slots.

    Args:
        history: the history of all jobs.
        job: the job, as it is in the history.
        actor: the supervisor.

    Raises:
        SafepointError, OSError: the processes could not be restored.
    """
    from safepoint.transparent.images.opening import key_of, open_images, parse_images
    from safepoint.transparent.thaw import thaw_image

    path = _image_with_nodes(history, job)
    place, image = parse_images(path)
    with open_images(place, key_of(None, is_made=False), only_authentic=True) as location:
        adopt = _adoption(history, job, path, actor, check=lambda: None)
        thaw_image(find_criu(), location, image or location.newest(), before_start=adopt)


def _adoption(
    history: History, job: JobRecord, path: str, actor: str, *, check: Callable[[], None]
) -> "Callable[[Sequence[Restored]], None]":
    """A function that records the restored processes as the launchers of the job's newest attempt."""

    def adopt(restored: "Sequence[Restored]") -> None:
        with history.transaction():
            now = history.job(job.name)
            if now != job:
                raise ConflictError(
                    f"job {job.name} was changed while it was restored; the restored processes were ended",
                    hint=f"see `safepoint status {job.name}`",
                )
            check()
            _refuse_others(job, restored, path)
            before = history.nodes(job.name, job.attempt)
            for node, one in zip(before, restored, strict=True):
                history.add_node(job.name, job.attempt, _again(node, one.pid))
            history.reopen_attempt(job.name, job.attempt)
            history.become(
                job.name,
                JobState.RESUMING,
                actor=actor,
                message=f"restored from {path}",
                wanted=RequestedAction.RUN,
                exit_code=None,
            )
            Launchers(job.spec, job_folder(job.name), job.attempt).readopt()

    return adopt


def _launchers_of(history: History, job: JobRecord) -> list[int]:
    """Check that a job can be frozen, and return the pids of its launchers, by node."""
    if job.state not in FREEZABLE or job.is_to_stop:
        raise ConflictError(
            f"job {job.name} is {job.state}, and only a running job can be frozen; nothing was frozen",
            hint=f"see `safepoint status {job.name}`",
        )
    roots = _roots_of(history, job)
    if len(roots) != job.num_nodes:
        raise ConflictError(f"job {job.name} is starting; nothing was frozen", hint="try again in a few seconds")
    everything = processes.processes_of(job_folder(job.name))
    trees = {pid for root in roots for pid in processes.tree_of(root)}
    for pid in everything:
        if pid not in trees and processes.tree_of(pid):
            raise FreezeError(
                f"process {pid} ({processes.name_of(pid)}) of job {job.name} is not a child of a launcher; "
                "nothing was frozen",
                hint="wait until it has ended, or end it",
            )
    return roots


def _roots_of(history: History, job: JobRecord) -> list[int]:
    nodes = history.nodes(job.name, job.attempt)
    return [node.process.pid for node in nodes if node.process.is_alive]


def _image_of(history: History, job: JobRecord) -> str:
    if job.state.is_active or job.state is JobState.COMPLETE:
        raise ConflictError(
            f"job {job.name} is {job.state}; nothing was restored", hint=f"see `safepoint status {job.name}`"
        )
    if job.image is None:
        raise NotFoundError(
            f"the newest attempt of job {job.name} has no process image; nothing was restored",
            hint=f"`safepoint resume {job.name}` continues from its newest checkpoint",
        )
    return _image_with_nodes(history, job)


def _image_with_nodes(history: History, job: JobRecord) -> str:
    if len(history.nodes(job.name, job.attempt)) != job.num_nodes:
        raise ConflictError(
            f"job {job.name} has another number of nodes than in its process image; nothing was restored",
            hint=f"`safepoint resume {job.name}` continues from its newest checkpoint",
        )
    return job.image or ""


def _refuse_full(history: History, job: JobRecord) -> None:
    """Raise ConflictError if other jobs have the slots or the GPUs of the job."""
    others = [other for other in history.jobs(slots.CONCERNED) if other.name != job.name]
    own = {gpu for node in history.nodes(job.name, job.attempt) for gpu in node.gpus}
    for other in others:
        taken = {gpu for node in history.nodes(other.name, other.attempt) for gpu in node.gpus if gpu in own}
        if taken and other.state.holds_slots:
            raise ConflictError(
                f"job {job.name} cannot run now, because job {other.name} uses its GPU {min(taken)}; nothing was "
                "restored",
                hint=f"suspend {other.name}, or try again later",
            )
    admission = slots.admit(job.name, [*others, job], slots.count_slots())
    if not admission.may_start:
        raise ConflictError(
            f"job {job.name} cannot run now, because it waits for {admission.waits_for}; nothing was restored",
            hint="suspend another job, or try again later",
        )


def _refuse_others(job: JobRecord, restored: "Sequence[Restored]", image: str) -> None:
    """Raise FreezeError if the restored processes are not the launchers of the job.

    A person who can write to a bucket can put another image of this user under the name of the job's image.
    """
    own = processes.processes_of(job_folder(job.name))
    if len(restored) != job.num_nodes or not all(one.pid in own for one in restored):
        raise FreezeError(
            f"{image} is not the image of job {job.name}, but another image of the same name; the restored processes "
            "were ended",
            hint=f"`safepoint resume {job.name}` continues from its newest checkpoint",
        )


def _again(node: NodeRecord, pid: int) -> NodeRecord:
    identity = processes.identify(pid)
    if identity is None:
        raise FreezeError(
            f"the restored launcher of node {node.node} ended at once", hint="look into the output of the job"
        )
    return NodeRecord(node=node.node, process=identity, gpus=node.gpus)


@contextlib.contextmanager
def _without_supervisor(job: JobRecord) -> Generator[None]:
    """Hold the lock of the job's supervisor, so that no supervisor can start."""
    deadline_s = clock.monotonic_s() + _EXITS_WITHIN_S
    while True:
        try:
            lock = FolderLock.acquire(supervisor_lock(job.name), {"pid": os.getpid()})
            break
        except BlockingIOError as error:
            if clock.monotonic_s() >= deadline_s:
                raise ConflictError(
                    f"another command uses job {job.name}; nothing was restored", hint="try again later"
                ) from error
            clock.sleep(_POLL_S)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
