"""How far a run is, for whoever asks: one small file, rewritten at most twice a second by the first rank.

The file is a convenience of the moment: it is not fsynced, and a full disk loses a figure, not the run.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from holdfast.foundation import clock
from holdfast.foundation.files import write_atomic

_INTERVAL_S = 0.5


class ProgressFile:
    """Writes `progress.json`.

    Args:
        path: the file, or None on all ranks but the first.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._due_s = 0.0

    def update(self, *, step: int, max_steps: int, epoch: float, loss: float | None, force: bool = False) -> None:
        """Tell where the run is.

        Args:
            step: optimizer steps done.
            max_steps: optimizer steps in all.
            epoch: epochs done, with the fraction of the running one.
            loss: the last one that was logged.
            force: also when the last update was a moment ago.
        """
        now_s = clock.monotonic_s()
        if self._path is None or (now_s < self._due_s and not force):
            return
        self._due_s = now_s + _INTERVAL_S
        record: dict[str, Any] = {
            "time": clock.utc_now(),
            "step": step,
            "max_steps": max_steps,
            "epoch": epoch,
            "loss": loss,
        }
        with contextlib.suppress(OSError):
            write_atomic(self._path, json.dumps(record).encode(), durable=False)


__all__ = ["ProgressFile"]
