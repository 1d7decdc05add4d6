"""Chooses whether a job continues from its process image or from its newest checkpoint. The newer of the two is used.

If an image is newer than a checkpoint, the processes in the image have passed the step of this checkpoint. An image
that cannot be restored is not used. The image is checked as far as possible without reading its pages.
"""

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.checkpoint.local.final_model import FINAL
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.errors import SafepointError, printable
from safepoint.foundation import clock
from safepoint.foundation.units import format_duration

if TYPE_CHECKING:
    from safepoint.jobs.model.records import JobRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The facts about a checkpoint that this choice needs.

    Args:
        step: its step.
        created_s: when it was made, in seconds since 1970. If its manifest states no valid time, this is when its
            files were last changed.
    """

    step: int
    created_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestState:
    """What a job continues from.

    Args:
        image: the path or URI of the image; None if the job continues from its newest checkpoint, or from the
            beginning because there is no checkpoint.
        why: what the job continues from and the reason, as a part of a sentence; empty if there was no choice.
    """

    image: str | None
    why: str


def newest_state(job: "JobRecord", output: str | None, *, from_checkpoint: bool = False) -> NewestState:
    """What a job continues from.

    Args:
        job: the job.
        output: the location of its checkpoints; None if it is unknown.
        from_checkpoint: whether the job must continue from a checkpoint, even if the image is newer.

    Raises:
        SafepointError: the location of its checkpoints cannot be read.
    """
    if job.image is None or from_checkpoint:
        return NewestState(image=None, why="")
    # This import is not at the top, because pods import this module, and the archive for pods has no `outputs`.
    from safepoint.jobs.local.outputs import open_output

    return choose(job.image, None if output is None else newest_checkpoint(open_output(job.spec, output)))


def choose(image: str, checkpoint: Checkpoint | None) -> NewestState:
    """Choose between an image and a checkpoint.

    Args:
        image: the path or URI of the image.
        checkpoint: the newest checkpoint; None if there is no checkpoint.
    """
    other = (
        "there is no checkpoint" if checkpoint is None else f"the newest checkpoint (step {checkpoint.step}) is older"
    )
    instead = "from the beginning" if checkpoint is None else f"from the checkpoint of step {checkpoint.step}"
    try:
        created_s = clock.parse_utc(_examine(image))
    except (SafepointError, OSError) as error:
        reason = error.message if isinstance(error, SafepointError) else error.strerror or str(error)
        return NewestState(image=None, why=f"{instead}, because the process image cannot be used: {reason}")
    age = f"{format_duration(max(0.0, clock.wall_s() - created_s))} old"
    if checkpoint is not None and checkpoint.created_s > created_s:
        return NewestState(image=None, why=f"{instead}, which is newer than {printable(image)}, {age}")
    return NewestState(image=image, why=f"from {printable(image)}, {age}; {other}")


def _examine(image: str) -> str:
    """When an image was made.

    Raises:
        SafepointError, OSError: the image cannot be restored here.
    """
    from safepoint.transparent.criu.program import find_criu
    from safepoint.transparent.packages import require_packages

    find_criu()
    require_packages()
    from safepoint.transparent.images.materialise import verify
    from safepoint.transparent.images.opening import key_of, open_images, parse_images

    place, name = parse_images(image)
    with open_images(place, key_of(None, is_made=False), only_authentic=True) as location:
        manifest = verify(location, name or location.newest(), deep=False)
    if manifest.machine.architecture != platform.machine():
        raise SafepointError(f"it was made on {manifest.machine.architecture}")
    return manifest.created


def newest_checkpoint(inventory: Inventory, *, until_s: float | None = None) -> Checkpoint | None:
    """The newest checkpoint from which a run would resume, as far as that is known without reading its files.

    None if there is no such checkpoint.

    `step` is the highest step of all checkpoints, and `created_s` is the latest time of all checkpoints. These can be
    two checkpoints: another person may have put an older checkpoint with a higher step there.

    Args:
        inventory: the location of the checkpoints.
        until_s: leave out checkpoints that were made after this time, in seconds since 1970.

    Raises:
        SafepointError: the location cannot be read.
    """
    if inventory.folder is not None and not inventory.folder.is_dir():
        return None
    found = [item for item in inventory.items() if item.counts and item.stated is not None and item.name != FINAL]
    if until_s is not None:
        found = [item for item in found if item.created_s <= until_s]
    if not found or found[0].stated is None:
        return None
    return Checkpoint(step=found[0].stated.step, created_s=max(item.created_s for item in found))
