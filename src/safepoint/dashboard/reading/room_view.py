"""How full the folders of jobs are, how fast they grow, and when a save will not fit any more."""

import contextlib
import shutil
from dataclasses import dataclass
from typing import Any

from safepoint.dashboard.reading.places import ListedJob, Places
from safepoint.errors import SafepointError
from safepoint.foundation.bounded import do_within
from safepoint.foundation.volumes.room import Room, room_of
from safepoint.jobs.model.job_place import JobPlace
from safepoint.progress.record import SpaceRecord
from safepoint.storage.location import parse_location

_LOOK_S = 0.5
"""Folders that are not read within this time, because a server does not answer, are shown without sizes."""
_MOST_FOLDERS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRoom:
    """An output location.

    Args:
        location: the folder or the address of the object store.
        jobs: the place and the name of each job that writes there, newest first.
        free_bytes: how much may still be written; None for an object store, and if it is not known.
        used_share: how full the disk is, from 0 to 1; None if it is not known.
        save_bytes: the size of the newest checkpoint; None if it is not known.
        saves_left: how many more saves fit; None if the number is unlimited or not known.
        remaining_s: seconds until a save does not fit; None if every save fits, or if the time is not known.
        is_low: whether a launcher has warned.
        is_here: whether this machine can read the location. If not, only the cluster of the jobs can.
    """

    location: str
    jobs: tuple[tuple[str, str], ...]
    free_bytes: int | None = None
    used_share: float | None = None
    save_bytes: int | None = None
    saves_left: int | None = None
    remaining_s: float | None = None
    is_low: bool = False
    is_here: bool = True

    @property
    def growth_bytes_s(self) -> float | None:
        """By how many bytes the location grows in a second; None if it does not grow, or if this is not known."""
        if not self.remaining_s or self.free_bytes is None:
            return None
        return self.free_bytes / self.remaining_s

    def to_document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "location": self.location,
            "jobs": [{"place": place, "name": name} for place, name in self.jobs],
            "free_bytes": self.free_bytes,
            "used_share": self.used_share,
            "save_bytes": self.save_bytes,
            "saves_left": self.saves_left,
            "remaining_s": self.remaining_s,
            "growth_bytes_s": self.growth_bytes_s,
            "is_low": self.is_low,
        }


def read_rooms(places: Places) -> list[PlaceRoom]:
    """The output locations of all jobs, the fullest first; without jobs whose location is not known."""
    found: dict[tuple[str, str], list[ListedJob]] = {}
    for reader in places.readers.values():
        listed = list(reader.read().jobs.values())
        try:
            outputs = reader.call(lambda jobs, listed=listed: _outputs(jobs, listed))
        except SafepointError:
            continue  # the list of jobs shows why
        for one, output in zip(listed, outputs, strict=True):
            if output is not None:
                found.setdefault(("" if reader.is_local else reader.key, output), []).append(one)
    shown = list(found.items())[-_MOST_FOLDERS:]
    measured = _measured([location for (place, location), _ in shown if not place])
    rooms = [
        _room(location, jobs, *measured.get(location, (None, None)), is_here=not place)
        for (place, location), jobs in shown
    ]
    return sorted(rooms, key=lambda room: (not room.is_low, room.free_bytes is None, room.free_bytes or 0))


def known_locations(places: Places) -> set[str]:
    """The output locations of the jobs of this machine.

    On a cluster, other people may choose the location of a job, such as a folder of this machine.
    """
    found: set[str] = set()
    for reader in places.readers.values():
        if not reader.is_local:
            continue
        listed = list(reader.read().jobs.values())
        with contextlib.suppress(SafepointError):  # the list of jobs shows why
            outputs = reader.call(lambda jobs, listed=listed: _outputs(jobs, listed))
            found |= {output for output in outputs if output is not None}
    return found


def _outputs(jobs: JobPlace[Any], listed: list[ListedJob]) -> list[str | None]:
    return [jobs.output_of(one.job) for one in listed]


def _room(
    location: str, jobs: list[ListedJob], room: Room | None, share: float | None, *, is_here: bool
) -> PlaceRoom:
    record = _record(jobs)
    newest = next((one.progress for one in reversed(jobs) if one.progress is not None), None)
    forecast_bytes = record.free_bytes if record is not None and record.path else None
    return PlaceRoom(
        location=location,
        jobs=tuple((one.place, one.job.name) for one in reversed(jobs))[:20],
        free_bytes=forecast_bytes if room is None else room.free_bytes,
        used_share=share,
        save_bytes=None if newest is None else newest.saves.last_bytes,
        saves_left=None if record is None else record.saves_left,
        remaining_s=None if record is None else record.remaining_s,
        is_low=record is not None and record.is_low,
        is_here=is_here,
    )


def _record(jobs: list[ListedJob]) -> SpaceRecord | None:
    """The forecast of a running job's launcher for the output folder.

    Pods of a cluster post only one forecast, for the folder that will be full first, and without its path.
    """
    for one in reversed(jobs):
        if one.progress is not None and one.job.state.holds_slots:
            for record in one.progress.space:
                if record.place == "output folder" or not record.path:
                    return record
    return None


def _measured(locations: list[str]) -> dict[str, tuple[Room | None, float | None]]:
    """The free space of folders, and how full their disks are. Folders that were not read in time are left out."""
    found: dict[str, tuple[Room | None, float | None]] = {}

    def measure() -> None:
        for location in locations:
            with contextlib.suppress(ValueError, OSError):
                place = parse_location(location)
                if place.is_folder:
                    usage = shutil.disk_usage(place.folder)
                    found[location] = room_of(place.folder), usage.used / usage.total if usage.total else None

    do_within(measure, _LOOK_S)
    return dict(found)
