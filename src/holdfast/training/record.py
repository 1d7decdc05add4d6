"""How a rank ended, told to its launcher through one small file per rank.

An exit code alone cannot say whether a 75 is Holdfast's or the user's own, nor whether a killed rank had
already committed. Without a launcher there is no file, and nothing is lost but that.
"""

import contextlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.foundation import clock
from holdfast.foundation.events import Restarted
from holdfast.foundation.files import write_atomic

_RESTART = "restart.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank says about itself.

    Args:
        rank: who.
        pid: its process.
        has_stepped: whether it got as far as one optimizer step.
        exit_code: Holdfast's own verdict; None while it runs, or when the user's program decides.
        lost_peer: whether it ended because another rank was gone.
        ended_s: when it knew that it ends, by the machine's monotonic clock; None while it runs, or when it was
            killed.
        message: one sentence for the console.
    """

    rank: int
    pid: int
    has_stepped: bool = False
    exit_code: int | None = None
    lost_peer: bool = False
    ended_s: float | None = None
    message: str = ""


class RecordFile:
    """Writes the record of this rank.

    Args:
        folder: the launcher's folder for this start of the ranks, or None without a launcher.
        rank: who.
    """

    def __init__(self, folder: str | None, rank: int, restart: int) -> None:
        self._path = Path(folder) / str(restart) / f"rank-{rank}.json" if folder else None
        self._record = RankRecord(rank=rank, pid=os.getpid())
        self._write()

    def stepped(self) -> None:
        """Remember that an optimizer step was done; cheap to call again."""
        if not self._record.has_stepped:
            self._update(has_stepped=True)

    def ended(self, exit_code: int, message: str) -> None:
        """Remember Holdfast's verdict. The first one stands: what follows is only the way out."""
        if self._record.exit_code is None:
            self._update(exit_code=exit_code, message=message, ended_s=self._record.ended_s or clock.monotonic_s())

    def failed(self, *, lost_peer: bool) -> None:
        """Remember that the rank ends by an error that is not Holdfast's verdict: the ranks may be started anew."""
        if self._record.ended_s is None:
            self._update(lost_peer=lost_peer, ended_s=clock.monotonic_s())

    def _update(self, **changes: Any) -> None:
        self._record = replace(self._record, **changes)
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            # The launcher may be gone and its folder with it; that must not change how the rank ends.
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(exist_ok=True)
                write_atomic(self._path, json.dumps(asdict(self._record)).encode(), durable=False)


def read_records(folder: Path, restart: int) -> dict[int, RankRecord]:
    """The records of one start of the ranks, by rank; unreadable ones are left out."""
    records: dict[int, RankRecord] = {}
    for path in (folder / str(restart)).glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            record = RankRecord(**json.loads(path.read_bytes()))
            records[record.rank] = record
    return records


def note_restart(folder: Path, event: Restarted) -> None:
    """Leave word for the ranks of the next start, which know where the run's events go."""
    with contextlib.suppress(OSError):
        write_atomic(folder / _RESTART, json.dumps(asdict(event)).encode(), durable=False)


def read_restart(folder: Path | None, restart: int) -> Restarted | None:
    """Why the ranks were started anew for the `restart`th time, if the launcher said so."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        event = Restarted(**json.loads(((folder or Path()) / _RESTART).read_bytes()))
        if folder is not None and event.restart == restart:
            return event
    return None


__all__ = ["RankRecord", "RecordFile", "note_restart", "read_records", "read_restart"]
