"""The checkpoints of a job or of any location."""

from dataclasses import dataclass

from safepoint.checkpoint.tools.documents import state_of
from safepoint.checkpoint.tools.inventory import Inventory, Item, open_inventory
from safepoint.errors import NotFoundError, SafepointError, UnsupportedError, UsageError
from safepoint.jobs.local.outputs import open_output
from safepoint.jobs.model.records import JobRecord
from safepoint.storage.location import parse_location


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """A checkpoint in a table.

    Args:
        item: the checkpoint.
        state: such as `complete` or `damaged`.
        is_in_use: whether a process reads it.
        world_size: with how many ranks it was saved; None if its manifest does not state it.
    """

    item: Item
    state: str
    is_in_use: bool
    world_size: int | None


def inventory_of_job(job: object, output: str | None) -> Inventory:
    """The checkpoints of a job, opened as the job itself would reach them.

    Raises:
        NotFoundError: the output location is not known yet.
        UnsupportedError: the job is on a cluster, and its claim cannot be read from here.
        SafepointError: the location cannot be reached.
    """
    if output is None:
        raise NotFoundError(
            "the output location of this job is not known yet", hint="its ranks report it when they start"
        )
    if isinstance(job, JobRecord):
        return open_output(job.spec, output)
    location = parse_location(output)
    if location.is_folder or str(location).startswith("pvc:"):
        raise UnsupportedError(
            f"{output} is in the cluster, and this page cannot read it",
            hint=f"`safepoint checkpoints list --on … {output}` reads it in a pod",
        )
    return open_any(output)[0]


def open_any(text: str) -> tuple[Inventory, str | None]:
    """The checkpoints at a location that a person has typed; see `open_inventory`.

    Raises:
        UsageError: the text is not a location.
        SafepointError: the location cannot be reached.
    """
    try:
        return open_inventory(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def rows_of(inventory: Inventory) -> list[CheckpointRow]:
    """All checkpoints, newest first; their files are not read."""
    return [
        CheckpointRow(
            item=item,
            state=state_of(item, item.faults, deep=False),
            is_in_use=inventory.is_in_use(item),
            world_size=_world_size(inventory, item),
        )
        for item in inventory.items()
    ]


def _world_size(inventory: Inventory, item: Item) -> int | None:
    if not item.is_complete or inventory.folder is None:  # in a store each manifest is a request
        return None
    try:
        return inventory.read_manifest(item).world_size
    except SafepointError:  # it was deleted since it was listed
        return None
