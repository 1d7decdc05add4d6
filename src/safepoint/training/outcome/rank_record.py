"""How a rank started and ended: each rank writes a small file in the launcher's folder, and the launcher reads it.

The exit code alone does not show whether Safepoint or the program itself ended the rank with code 75, or whether a
killed rank had committed a checkpoint before. If there is no launcher, no file is written.

The folder is usually in /dev/shm, which every user of the machine can fill. If there is no free space for a new file,
a record overwrites the file of an earlier record of the same rank. For this purpose, each record is filled up with
spaces to `_SIZE_BYTES`.
"""

import contextlib
import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safepoint.foundation import clock
from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.environment import Place
from safepoint.foundation.events.start_events import Moment, Phase
from safepoint.foundation.files import write_atomic, write_in_room

_NAME = re.compile(r"start-[0-9]{1,9}-rank-[0-9]{1,9}\.json")
_SIZE_BYTES = 4096
_MAX_MESSAGE = 500
"""A message of this many characters fits into `_SIZE_BYTES`, even if all characters are escaped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """The state of one rank, or how it ended.

    Args:
        rank: the rank's number.
        pid: the process id of the rank.
        has_stepped: whether the rank has done an optimizer step.
        exit_code: the exit code, if Safepoint ended the rank; None while it runs, or if the user's program ended it.
        lost_peer: whether the rank ended because another rank was gone.
        ended_s: when the rank began to end, by the machine's monotonic clock; None if the rank runs or was killed.
        message: why the rank ended, one sentence.
        is_expendable: whether a kill of this rank loses nothing that the rank could still save. This is so if the
            rank trains, its state goes to the keeper (the process of the node that writes snapshots to disk), and the
            rank itself writes no checkpoint at the moment.
        moments: when the rank passed the phases of its start, oldest first.
    """

    rank: int
    pid: int
    has_stepped: bool = False
    exit_code: int | None = None
    lost_peer: bool = False
    ended_s: float | None = None
    message: str = ""
    is_expendable: bool = False
    moments: tuple[Moment, ...] = ()

    def can_be_killed(self, *, after_kill: bool) -> bool:
        """Whether this rank has nothing to do if another rank has died: no state to save, no error to print.

        Args:
            after_kill: whether a signal has killed the other rank. If so, an error of this rank is a consequence of
                the kill.
        """
        is_cause_of_its_own = self.ended_s is not None and not self.lost_peer and not after_kill
        return self.is_expendable and self.exit_code is None and not is_cause_of_its_own


class RankRecordWriter:
    """Writes the record of this rank.

    Args:
        folder: the launcher's folder; None if there is no launcher. Each rank has one file in it for each start of
            the ranks.
        place: the position of this rank among the ranks.
    """

    def __init__(self, folder: str | None, place: Place) -> None:
        starts = range(place.restart, -1, -1)
        self._paths = [Path(folder, f"start-{start}-rank-{place.rank}.json") for start in starts if folder]
        """The file of the record, and the files of earlier starts, newest first. Empty if there is no launcher."""
        self._record = RankRecord(rank=place.rank, pid=os.getpid())
        self._write()

    @property
    def message(self) -> str:
        """Why the rank ends; empty while it runs."""
        return self._record.message

    def stepped(self) -> None:
        """Record that an optimizer step was done. Calls after the first write nothing."""
        if not self._record.has_stepped:
            self._update(has_stepped=True, moments=(*self._record.moments, _now(Phase.FIRST_STEP_DONE)))

    def passed(self, phase: Phase) -> None:
        """Record that this rank has passed a phase of its start. Only the first call for each phase has an effect."""
        moments = self._record.moments
        if not self._record.has_stepped and phase not in {moment.phase for moment in moments}:
            self._update(moments=(*moments, _now(phase)))

    @property
    def is_expendable(self) -> bool:
        """The last value of `set_expendable`."""
        return self._record.is_expendable

    def set_expendable(self, is_expendable: bool) -> None:
        """Record whether a kill of this rank loses nothing; see `RankRecord`."""
        if self._record.is_expendable != is_expendable:
            self._update(is_expendable=is_expendable)

    def ended(self, exit_code: int, message: str) -> None:
        """Record that Safepoint ends the rank with `exit_code`. Calls after the first change nothing."""
        if self._record.exit_code is None:
            self._update(exit_code=exit_code, message=message, ended_s=self._record.ended_s or clock.monotonic_s())

    def failed(self, *, lost_peer: bool, message: str = "") -> None:
        """Record that the rank ends by an error. The ranks may be restarted after this error."""
        if self._record.ended_s is None:
            self._update(lost_peer=lost_peer, ended_s=clock.monotonic_s(), message=message)

    def _update(self, **changes: Any) -> None:
        self._record = replace(self._record, **changes)
        self._write()

    def _write(self) -> None:
        if not self._paths:
            return
        # The launcher and its folder may be gone. That must not change how the rank ends.
        with contextlib.suppress(OSError):
            try:
                write_atomic(self._paths[0], _bytes_of(self._record), durable=False)
            except OSError:
                room = next((path for path in self._paths if path.exists()), None)
                if room is not None:  # if there is no earlier record, there was never any free space
                    short = replace(self._record, message=self._record.message[:_MAX_MESSAGE])
                    write_in_room(self._paths[0], _bytes_of(short), room)


def _now(phase: Phase) -> Moment:
    return Moment(phase=phase, at_s=round(clock.monotonic_s(), 6))


def _bytes_of(record: RankRecord) -> bytes:
    return json.dumps(asdict(record)).encode().ljust(_SIZE_BYTES)


def read_records(folder: Path, restart: int) -> dict[int, RankRecord]:
    """The records of one start of the ranks, by rank; records that cannot be read are left out.

    Args:
        folder: the launcher's folder.
        restart: the number of the start: 0 for the first start, 1 for the first restart.
    """
    records: dict[int, RankRecord] = {}
    for path in folder.glob(f"start-{restart}-rank-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            fields = read_object(path)
            moments = tuple(Moment(**moment) for moment in fields.pop("moments", ()))
            record = RankRecord(**fields, moments=moments)
            records[record.rank] = record
    return records


def newest_records(folder: Path) -> dict[int, RankRecord]:
    """The records of the newest start of the ranks, by rank.

    Args:
        folder: the launcher's folder.
    """
    starts = [int(name.split("-")[1]) for name in os.listdir(folder) if _NAME.fullmatch(name)]
    return read_records(folder, max(starts)) if starts else {}
