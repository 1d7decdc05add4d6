"""The argument LOCATION of a command about checkpoints, and how the command opens it.

A command with this argument

- has a parameter `location` (or `source` and `target`, or `before` and `after`) of type `CheckpointPlace` or
  `OutputPlace`, and a parameter `connection` of type `safepoint.cli.place.ConnectionOrSecret`;
- has the decorator `with_clusters` (`safepoint.cli.claims.from_outside`) below `@app.command()`. The decorator adds
  `--on`, `--namespace`, `--image` and `--memory`, and runs the command in a pod if the location is a claim of a
  cluster;
- is named in `_WRITTEN` of `safepoint.cli.claims.from_outside` if it writes to the location. For other commands a
  claim is read-only;
- calls `open_place` and, for one checkpoint, `pick`.
"""

import itertools
from typing import Annotated

import typer

from safepoint.checkpoint.tools.documents import state_of
from safepoint.checkpoint.tools.inventory import Inventory, Item, open_inventory
from safepoint.cli.place import find_place
from safepoint.errors import UsageError
from safepoint.foundation.events import console
from safepoint.storage.location import Location, parse_location, resolve_claim

CheckpointPlace = Annotated[
    str,
    typer.Argument(
        metavar="LOCATION",
        help="An output folder, s3://bucket/prefix, pvc://claim/path, or job:NAME for the output location of a job. "
        "Append /checkpoint-20 for one checkpoint or, in an object store, /final for the final model.",
        callback=find_place,
    ),
]
"""A checkpoint or an output location. The command receives the text; job:NAME is replaced by the job's location."""
OutputPlace = Annotated[
    str,
    typer.Argument(
        metavar="LOCATION",
        help="An output folder, s3://bucket/prefix, pvc://claim/path, or job:NAME for the output location of a job.",
        callback=find_place,
    ),
]
"""An output location; see `CheckpointPlace`."""


def open_place(text: str) -> tuple[Inventory, str | None]:
    """Open the location that a person has typed.

    Returns:
        The content of the location, and the name of the checkpoint that `text` names; None in place of the name if
        `text` does not name a single checkpoint.

    Raises:
        UsageError: `text` is not a location.
    """
    console.set_up(0)
    try:
        return open_inventory(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def pick(inventory: Inventory, name: str | None) -> Item:
    """The checkpoint of this name. Without a name: the newest checkpoint that counts (`Item.counts`).

    Without a name, a warning lists newer checkpoints that do not count.
    """
    item = inventory.item(name)
    if name is None:
        newer = itertools.takewhile(lambda other: other.name != item.name, inventory.items())
        unused = [f"{other.name} ({state_of(other, other.faults, deep=False)})" for other in newer]
        if unused:
            console.set_up(0).warning("using %s; newer ones are not used: %s", item.name, ", ".join(unused))
    return item


def location_of(text: str) -> Location:
    """The location that a person has typed; a claim becomes the folder where it is mounted.

    Raises:
        UsageError: `text` is not a location.
    """
    try:
        return resolve_claim(parse_location(text))
    except ValueError as error:
        raise UsageError(str(error)) from error
