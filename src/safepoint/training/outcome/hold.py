"""A hold: after a requested save, the ranks wait. If the job is then suspended, no step is lost.

A process in the pod of the first node requests the hold (`launcher/save_request.py`), with a file in the launcher's
folder. The first rank reads this file, and the vote (the small all-reduce in each step) informs the other ranks. A
hold ends by itself: the file requests a hold only for `HOLD_S` seconds after it was last touched. So the training
continues if the process that requested the hold is killed.
"""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from safepoint.foundation import clock
from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.files import write_atomic

HOLD_S = 60.0
"""How long the ranks wait after the requesting process has last touched the file."""
_REQUESTED, _HELD = "hold", "held"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the first rank reports when the ranks have saved and wait.

    Args:
        step: optimizer steps done.
        is_saved: whether a checkpoint of this step is in the output folder.
        folder: the output folder, absolute.
        location: the location in an object store to which checkpoints are uploaded; empty if there is no object
            store.
    """

    step: int
    is_saved: bool
    folder: str
    location: str


class Hold:
    """The files of a hold.

    Args:
        folder: the launcher's folder; None if there is no launcher, and on ranks other than the first rank. If it is
            None, no file is read or written, and no hold is requested.
    """

    def __init__(self, folder: Path | str | None) -> None:
        self._folder = None if folder is None else Path(folder)

    @property
    def is_requested(self) -> bool:
        """Whether the ranks are to wait after the save."""
        if self._folder is None:
            return False
        try:
            modified_s = os.stat(self._folder / _REQUESTED).st_mtime
        except OSError:
            return False
        return abs(clock.wall_s() - modified_s) < HOLD_S

    def request(self) -> None:
        """Request a hold, or extend it."""
        if self._folder is not None:
            (self._folder / _REQUESTED).touch()

    def withdraw(self) -> None:
        """End the hold, so that the ranks continue."""
        self._remove(_REQUESTED)

    def begins(self, held: Held) -> None:
        """Report that the ranks wait."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                write_atomic(self._folder / _HELD, json.dumps(asdict(held)).encode(), durable=False)

    def ends(self) -> None:
        """Report that the ranks no longer wait."""
        self._remove(_HELD)

    @property
    def held(self) -> Held | None:
        """What the first rank has reported; None while the ranks train."""
        if self._folder is None:
            return None
        try:
            return Held(**read_object(self._folder / _HELD))
        except (OSError, ValueError, TypeError):
            return None

    def _remove(self, name: str) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()
