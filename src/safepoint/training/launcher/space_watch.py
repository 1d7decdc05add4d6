"""Watches the free space for saves: warns early, and records a forecast.

On every node the launcher watches the temporary folder, in which ranks write the small files of a save. If the
launcher's node manages the output folder (see `Folders`), the launcher watches this folder too. The launcher deletes
nothing. If there is no room for a save, the keeper or a rank first deletes older checkpoints
(`checkpoint.local.thinning`).

Each look at a folder runs on a thread of its own. The next look at this folder begins only when the last look has
returned. So if a folder hangs, only one thread hangs. The training never waits for a look. When a look at one folder
hangs, the watch waits 10 s for this look. So the look at the other folder begins up to 10 s late. After these 10 s,
the watch does not wait for the same look again.
"""

import contextlib
import dataclasses
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.thinning import with_spare
from safepoint.checkpoint.local.usage import Usage, UsageReader, growth_of
from safepoint.estimates.forecast import Alarm, Change, Demand, Forecast, Trend, forecast
from safepoint.foundation import clock
from safepoint.foundation.bounded import Work
from safepoint.foundation.events.space_events import SpaceLow, SpaceRegained, SpaceUnknown
from safepoint.foundation.events.stream import Event
from safepoint.foundation.files import write_atomic
from safepoint.foundation.volumes.occupied import Occupied
from safepoint.foundation.volumes.room import Room, room_of
from safepoint.progress.record import SPACE_NAME, SpaceRecord
from safepoint.training.outcome.launcher_folder import SMALL_FILES_BYTES
from safepoint.training.outcome.watched_folder import WatchedFolder, shared_watched_folder

_log = logging.getLogger("safepoint")
_LEAST_PERIOD_S, _MOST_PERIOD_S = 0.5, 10.0
_FIRST_PERIOD_S = 1.0
"""The time between two looks. Once the run has saved twice, this time depends on the interval between its saves."""
_LOOKS_PER_SAVE = 4
_LIMIT_S = 10.0
_MOST_SAVES = 8
"""The estimated time between two saves is the mean over at most this many saves."""
_SILENT = f"it has not answered for {_LIMIT_S:.0f} s"
_NO_SIZE = "its file system does not state how much is free"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What was seen in a folder.

    Args:
        room: how much the folder can still hold; None if the file system does not state it.
        usage: what the run's checkpoints occupy; empty for the temporary folder.
    """

    room: Room | None
    usage: Usage = field(default_factory=Usage)


class _Watched(Protocol):
    """A folder that is watched."""

    place: str
    path: Path

    def look(self) -> _Look:
        """Look at the folder; may hang, and may raise OSError."""
        ...

    def demands(self, usage: Usage, now_s: float) -> tuple[Demand, Demand]:
        """What the coming saves need: in bytes, and in inodes."""
        ...

    def num_deletable(self, usage: Usage) -> int:
        """How many checkpoints can be deleted for a save."""
        ...


class _TemporaryFolder:
    """The folder of the launcher. Saves need some free space there only while they run."""

    place = "temporary folder"

    def __init__(self, path: Path) -> None:
        self.path = path

    def look(self) -> _Look:
        """See `_Watched`."""
        return _Look(room=room_of(self.path))

    def demands(self, usage: Usage, now_s: float) -> tuple[Demand, Demand]:
        """See `_Watched`."""
        return Demand(needed=SMALL_FILES_BYTES), Demand(needed=with_spare(Occupied()).num_inodes)

    def num_deletable(self, usage: Usage) -> int:
        """See `_Watched`."""
        return 0


class _OutputFolder:
    """The folder with the checkpoints of the run."""

    def __init__(self, watched: WatchedFolder) -> None:
        self.place = watched.place
        self.path = Path(watched.folder)
        self._watched = watched
        self._policies = watched.policies
        self._reader = UsageReader(OutputFolder(self.path), watched.run_id, self._policies)
        self._newest: int | None = None
        self._saves_s: deque[float] = deque(maxlen=_MOST_SAVES)

    def look(self) -> _Look:
        """See `_Watched`."""
        return _Look(room=room_of(self.path), usage=self._reader.read())

    def demands(self, usage: Usage, now_s: float) -> tuple[Demand, Demand]:
        """See `_Watched`."""
        self._note_saves(usage, now_s)
        interval_s = self.interval_s
        growth = growth_of(usage, self._policies, interval_s)
        save = usage.newest or Occupied(num_bytes=self._watched.expected_bytes)
        needed = with_spare(save)
        next_s = 0.0
        if interval_s is not None:
            next_s = max(0.0, self._saves_s[-1] + interval_s - now_s)

        def demand(needed: int, kept: int) -> Demand:
            return Demand(
                needed=needed,
                kept=kept,
                saves_until_limit=growth.saves_until_limit,
                kept_later=growth.share_later * kept,
                interval_s=interval_s,
                next_s=next_s,
            )

        return demand(needed.num_bytes, save.num_bytes), demand(needed.num_inodes, save.num_inodes)

    def num_deletable(self, usage: Usage) -> int:
        """See `_Watched`."""
        return usage.num_deletable(self._policies)

    @property
    def interval_s(self) -> float | None:
        """Seconds between two saves; None if fewer than two saves were seen."""
        if len(self._saves_s) < 2:
            return None
        return (self._saves_s[-1] - self._saves_s[0]) / (len(self._saves_s) - 1)

    def _note_saves(self, usage: Usage, now_s: float) -> None:
        newest = usage.checkpoints[0].step if usage.checkpoints else None
        # A checkpoint that is there at the first look counts as a checkpoint of an earlier start.
        if newest is not None and self._newest is not None and newest > self._newest:
            self._saves_s.append(now_s)
        self._newest = newest if newest is not None else (self._newest or 0)


class FolderWatch:
    """Watches one folder: derives a forecast from repeated looks, and reports when the free space becomes low.

    Args:
        watched: the folder.
        report: receives the events.
    """

    def __init__(self, watched: _Watched, report: Callable[[Event], None]) -> None:
        self._watched = watched
        self._report = report
        self._bytes, self._inodes = Trend(), Trend()
        self._alarm = Alarm()
        self._work: Work[_Look] | None = None
        self._is_unknown_reported = False
        self.record: SpaceRecord | None = None
        """What was found last; None before the first look, and if the free space is not known."""

    def look(self) -> None:
        """Look at the folder, for a limited time; report what has changed."""
        limit_s = _LIMIT_S
        if self._work is None:
            self._work = Work(self._watched.look)
        else:
            limit_s = 0.0  # the last look hangs; do not wait for it again
        try:
            found = self._work.result(limit_s)
        except (OSError, ValueError) as error:
            self._work = None
            self._unknown(getattr(error, "strerror", None) or str(error))
            return
        if found is None:  # the look has not returned yet
            self._unknown(_SILENT)
            return
        self._work = None
        if found.room is None:
            self._unknown(_NO_SIZE)
            return
        self._conclude(found.room, found.usage, clock.monotonic_s())

    def _unknown(self, reason: str) -> None:
        self.record = None
        if not self._is_unknown_reported:
            self._is_unknown_reported = True
            self._report(SpaceUnknown(place=self._watched.place, path=str(self._watched.path), reason=reason))

    def _conclude(self, room: Room, usage: Usage, now_s: float) -> None:
        self._bytes.add(now_s, -room.free_bytes - usage.total.num_bytes)
        of_bytes, of_inodes = self._watched.demands(usage, now_s)
        found, limit = forecast(room.free_bytes, of_bytes, self._bytes), str(room.limit)
        if room.free_inodes is not None:
            self._inodes.add(now_s, -room.free_inodes - usage.total.num_inodes)
            in_inodes = forecast(room.free_inodes, of_inodes, self._inodes)
            if _order(in_inodes) < _order(found):
                found, limit = in_inodes, "inodes"
        change = self._alarm.update(now_s, found)
        self.record = SpaceRecord(
            place=self._watched.place,
            path=str(self._watched.path),
            limit=limit,
            free_bytes=room.free_bytes,
            needed_bytes=of_bytes.needed,
            free_inodes=room.free_inodes,
            needed_inodes=of_inodes.needed,
            saves_left=found.saves_left,
            remaining_s=found.remaining_s,
            num_deletable=self._watched.num_deletable(usage),
            is_low=self._alarm.is_low,
            size_bytes=room.size_bytes,
        )
        if change is Change.LOW:
            self._report(_low(self.record, self._bytes.per_s))
        elif change is Change.REGAINED:
            self._report(
                SpaceRegained(place=self.record.place, path=self.record.path, free_bytes=self.record.free_bytes)
            )


def _order(found: Forecast) -> tuple[float, float]:
    """A key for comparisons: the sooner the free space is used up, the smaller is the key."""
    infinite = float("inf")
    saves = infinite if found.saves_left is None else found.saves_left
    return saves, infinite if found.remaining_s is None else found.remaining_s


def _low(found: SpaceRecord, growth_per_s: float) -> SpaceLow:
    names = {one.name for one in dataclasses.fields(found)} - {"is_low", "size_bytes"}
    values = {name: getattr(found, name) for name in names}
    return SpaceLow(**values, growth_bytes_per_s=round(growth_per_s, 3))


class SpaceWatch:
    """Watches the folders of one node on a thread, until `stop` is called.

    Args:
        folder: the launcher's folder.
        report: receives the events.
    """

    def __init__(self, folder: Path, report: Callable[[Event], None]) -> None:
        self._folder = folder
        self._report_event = report
        self._temporary = FolderWatch(_TemporaryFolder(folder), self._report)
        self._shared: WatchedFolder | None = None
        self._output: _OutputFolder | None = None
        self._output_watch: FolderWatch | None = None
        self._stopping = threading.Event()

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._run, name="safepoint-space", daemon=True).start()

    def stop(self) -> None:
        """Stop watching, without waiting for a look that hangs."""
        self._stopping.set()

    def _report(self, event: Event) -> None:
        _log.log(logging.WARNING if event.is_warning else logging.INFO, "%s", event.line)
        self._report_event(event)

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            try:
                self.look()
            except Exception:  # noqa: BLE001  must not end the training, and must not stop the watch
                _log.debug("the free space of the folders could not be read", exc_info=True)

    @property
    def _period_s(self) -> float:
        interval_s = None if self._output is None else self._output.interval_s
        if interval_s is None:
            return _FIRST_PERIOD_S
        return min(_MOST_PERIOD_S, max(_LEAST_PERIOD_S, interval_s / _LOOKS_PER_SAVE))

    def look(self) -> None:
        """Look at all folders once, and record what was found."""
        shared = shared_watched_folder(self._folder)
        if shared is not None and shared != self._shared:  # another training of the script may use another folder
            self._shared = shared
            self._output = _OutputFolder(shared) if shared.is_owned else None
            self._output_watch = None if self._output is None else FolderWatch(self._output, self._report)
        watches = [watch for watch in (self._output_watch, self._temporary) if watch is not None]
        for watch in watches:
            watch.look()
        self._write([watch.record for watch in watches if watch.record is not None])

    def _write(self, records: Sequence[SpaceRecord]) -> None:
        document = {"space": [record.to_document() for record in records]}
        with contextlib.suppress(OSError):
            write_atomic(self._folder / SPACE_NAME, json.dumps(document).encode(), durable=False)
