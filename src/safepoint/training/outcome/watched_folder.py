"""What the first rank of a node reports to its launcher about the output folder.

The launcher watches the free space of this folder.
"""

import contextlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safepoint.checkpoint.local.retention import Policy, parse_policies
from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.files import write_atomic

_NAME = "watched.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedFolder:
    """The output folder of a node.

    Args:
        folder: the absolute path.
        place: the word for the folder, for messages: `output folder`, or `local folder` if checkpoints are uploaded
            from there.
        run_id: the id of the run.
        keep: the policies of retention, as `parse_policies` reads them.
        limit: how many checkpoints the script keeps; None for all.
        expected_bytes: the size of the files that the next save writes there, if there is no checkpoint yet.
        is_owned: whether a rank of this node manages the folder. Other nodes do not watch a folder that all share.
    """

    folder: str
    place: str
    run_id: str
    keep: str | None
    limit: int | None
    expected_bytes: int
    is_owned: bool

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies of retention in the folder."""
        return parse_policies(self.keep, self.limit)


def share_watched_folder(folder: str | None, watched: WatchedFolder) -> None:
    """Report the output folder to the launcher whose folder is `folder`. Do nothing if `folder` is None."""
    if folder is not None:
        with contextlib.suppress(OSError):
            write_atomic(Path(folder) / _NAME, json.dumps(asdict(watched)).encode(), durable=False)


def shared_watched_folder(folder: Path) -> WatchedFolder | None:
    """The output folder that a rank has reported; None if no rank has reported a folder yet."""
    try:
        record: dict[str, Any] = read_object(folder / _NAME)
        return WatchedFolder(**{one.name: record[one.name] for one in fields(WatchedFolder)})
    except (OSError, ValueError, KeyError, TypeError):
        return None
