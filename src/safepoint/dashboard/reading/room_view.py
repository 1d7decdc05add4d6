"""How full the folders and buckets of jobs are, how fast they grow, and when a save will not fit any more."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from safepoint.dashboard.reading.bucket_usage import BucketUsage, OpenStore, Usage
from safepoint.dashboard.reading.checkpoint_view import inventory_of_job
from safepoint.dashboard.reading.places import ListedJob, Places
from safepoint.errors import SafepointError
from safepoint.foundation.bounded import do_within
from safepoint.foundation.volumes.room import Room, room_of
from safepoint.jobs.local.outputs import open_output
from safepoint.jobs.model.job_place import JobPlace
from safepoint.jobs.model.records import JobRecord
from safepoint.progress.record import OUTPUT_FOLDER, SpaceRecord
from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store

_LOOK_S = 0.5
"""Folders that are not read within this time, because a server does not answer, are shown without sizes."""
MOST_FOLDERS = 100
"""The limit of output locations that the page of storage shows."""
_MOST_NAMES = 20
"""The limit of jobs that are named for a location."""
_MOST_BUCKETS = 20
"""The limit of locations in object stores whose objects are listed."""
_Key = tuple[str, str]
"""The place of the jobs, empty for this machine, and the location."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRoom:
    """An output location, or a location in an object store whose size is configured.

    Args:
        location: the folder or the address of the object store.
        jobs: the place and the name of the newest jobs that write there, newest first.
        num_jobs: how many jobs write there.
        free_bytes: how much may still be written; None if it is not known, as for an object store without a size.
        used_share: the used share of the disk, of the claim, or of the configured size of an object store, from 0 to
            1; None if it is not known.
        save_bytes: the size of the newest checkpoint; None if it is not known.
        saves_left: how many more saves fit; None if the number is unlimited or not known.
        remaining_s: seconds until a save does not fit; None if every save fits, or if the time is not known. For an
            object store with a size: seconds until it is full, at the earliest.
        growth_bytes_s: the growth of the location in bytes per second; None if it does not grow, or if the growth is
            not known. For an object store, this is an upper limit, see `Usage`.
        is_low: whether a launcher has warned of little free space, or the next checkpoint does not fit into an object
            store.
        is_here: whether this machine can read the location. If not, only the cluster of the jobs can.
        is_bucket: whether it is in an object store.
        stored_bytes: how much is stored in an object store; None if it is not known.
        is_part: whether more than `stored_bytes` is stored.
        size_bytes: how much may be stored in an object store; None if this is not configured.
        missing: why `stored_bytes` of an object store is not known; empty if it is known.
    """

    location: str
    jobs: tuple[tuple[str, str], ...]
    num_jobs: int
    free_bytes: int | None = None
    used_share: float | None = None
    save_bytes: int | None = None
    saves_left: int | None = None
    remaining_s: float | None = None
    growth_bytes_s: float | None = None
    is_low: bool = False
    is_here: bool = True
    is_bucket: bool = False
    stored_bytes: int | None = None
    is_part: bool = False
    size_bytes: int | None = None
    missing: str = ""

    def to_document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "location": self.location,
            "jobs": [{"place": place, "name": name} for place, name in self.jobs],
            "num_jobs": self.num_jobs,
            "free_bytes": self.free_bytes,
            "used_share": self.used_share,
            "stored_bytes": self.stored_bytes,
            "is_part": self.is_part,
            "size_bytes": self.size_bytes,
            "missing": self.missing,
            "save_bytes": self.save_bytes,
            "saves_left": self.saves_left,
            "remaining_s": self.remaining_s,
            "growth_bytes_s": self.growth_bytes_s,
            "is_low": self.is_low,
        }


def read_rooms(
    places: Places, usage: BucketUsage, *, sizes: Mapping[str, int], wait_s: float = 0.0
) -> tuple[list[PlaceRoom], int]:
    """The output locations of the newest jobs. Jobs whose location is not known are left out.

    Args:
        places: where the jobs are.
        usage: lists locations in object stores.
        sizes: location in an object store → how many bytes may be stored below it. These locations are listed, too.
        wait_s: how long to wait for the listing of an object store, in seconds.

    Returns:
        The locations, and how many locations of older jobs are left out. Locations that are nearly full are first,
        then the locations with the least free space.
    """
    found = _by_location(places, lambda one: True)
    shown = dict(list(found.items())[-MOST_FOLDERS:])
    num_older = len(found) - len(shown)
    for location in sizes:
        shown.pop(("", location), None)  # so that it is among the newest locations, which are listed
        shown[("", location)] = _below(found, location)
    openers = {key: open_store for key, jobs in shown.items() if (open_store := _opener(places, key, jobs))}
    openers = dict(list(openers.items())[-_MOST_BUCKETS:])
    stored = usage.look({_name(key): open_store for key, open_store in openers.items()}, wait_s=wait_s)
    measured = _measured([location for place, location in shown if not place and ("", location) not in openers])
    rooms: list[PlaceRoom] = []
    for (place, location), jobs in shown.items():
        room = _room(location, jobs, measured.get(location), is_here=not place)
        if _is_remote(location):
            size_bytes = None if place else sizes.get(location)
            is_listed = (place, location) in openers
            room = _of_bucket(room, stored.get(_name((place, location))), size_bytes, is_listed=is_listed)
        rooms.append(room)
    return sorted(rooms, key=lambda room: (not room.is_low, room.free_bytes is None, room.free_bytes or 0)), num_older


def without_room(places: Places, usage: BucketUsage, *, sizes: Mapping[str, int]) -> dict[str, str]:
    """The active jobs whose next save does not fit into an object store of a configured size, as far as is known.

    Args:
        places: where the jobs are.
        usage: lists what is stored. If it is not known yet what a location stores, the jobs there are left out.
        sizes: see `read_rooms`.

    Returns:
        The key of each such job → why it needs attention.
    """
    if not sizes:
        return {}
    found = _by_location(places, lambda one: one.job.state.is_active)
    of_size = {("", location): jobs for location in sizes if (jobs := _below(found, location))}
    openers = {key: open_store for key, jobs in of_size.items() if (open_store := _opener(places, key, jobs))}
    stored = usage.look({_name(key): open_store for key, open_store in openers.items()})
    reasons: dict[str, str] = {}
    for key, jobs in of_size.items():
        known, location = stored.get(_name(key)), key[1]
        if known is None or known.failure:
            continue
        for one in jobs:
            save_bytes = None if one.progress is None else one.progress.saves.last_bytes
            if _is_full(sizes[location] - known.stored_bytes, save_bytes):
                reasons[one.key] = f"the location {location} has no room for the next save"
    return reasons


def _is_full(free_bytes: int, save_bytes: int | None) -> bool:
    """Whether the next save does not fit."""
    return free_bytes < max(1, save_bytes or 0)


def _by_location(places: Places, is_wanted: Callable[[ListedJob], bool]) -> dict[_Key, list[ListedJob]]:
    found: dict[_Key, list[ListedJob]] = {}
    for reader in places.readers.values():
        listed = [one for one in reader.read().jobs.values() if is_wanted(one)]
        try:
            outputs = reader.call(lambda jobs, listed=listed: _outputs(jobs, listed))
        except SafepointError:
            continue  # the list of jobs shows why
        for one, output in zip(listed, outputs, strict=True):
            if output is not None:
                found.setdefault(("" if reader.is_local else reader.key, output), []).append(one)
    return found


def _below(found: Mapping[_Key, list[ListedJob]], location: str) -> list[ListedJob]:
    """The jobs whose output is in a location."""
    below = [jobs for (_, output), jobs in found.items() if f"{output}/".startswith(f"{location}/")]
    return [one for jobs in below for one in jobs]


def _name(key: _Key) -> str:
    return "|".join(key)


def _is_remote(location: str) -> bool:
    with contextlib.suppress(ValueError):
        return parse_location(location).is_remote
    return False


def _opener(places: Places, key: _Key, jobs: list[ListedJob]) -> OpenStore | None:
    """A function that opens the store of a location as its job does; None if the location is not in an object store.

    A location that only the configuration names is opened with the keys of this process.
    """
    place, location = key
    if not _is_remote(location):
        return None
    if place:
        reader, name = places.reader(place), jobs[-1].job.name
        return lambda: inventory_of_job(reader, name).store
    spec = next((one.job.spec for one in reversed(jobs) if isinstance(one.job, JobRecord)), None)
    if spec is None:
        return lambda: open_store(parse_location(location))
    return lambda: open_output(spec, location).store


def _of_bucket(room: PlaceRoom, usage: Usage | None, size_bytes: int | None, *, is_listed: bool) -> PlaceRoom:
    """The room, with the result of a listing."""
    if usage is None or usage.failure:
        why = "it is being counted" if is_listed else f"only the newest {_MOST_BUCKETS} locations are counted"
        missing = why if usage is None else usage.failure
        return replace(room, is_bucket=True, size_bytes=size_bytes, missing=missing)
    growth = usage.growth_bytes_s or None
    room = replace(
        room,
        is_bucket=True,
        stored_bytes=usage.stored_bytes,
        is_part=usage.is_part,
        growth_bytes_s=growth,
        size_bytes=size_bytes,
    )
    if size_bytes is None:
        return room
    free_bytes = max(0, size_bytes - usage.stored_bytes)
    return replace(
        room,
        free_bytes=None if usage.is_part and free_bytes else free_bytes,
        used_share=min(1.0, usage.stored_bytes / size_bytes) if size_bytes else 1.0,
        remaining_s=free_bytes / growth if growth else None,
        is_low=_is_full(free_bytes, room.save_bytes),
    )


def known_locations(places: Places) -> set[str]:
    """The output locations of the jobs of this machine.

    Jobs on clusters do not count, because other people may choose their location, such as a folder of this machine.
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


def _room(location: str, jobs: list[ListedJob], room: Room | None, *, is_here: bool) -> PlaceRoom:
    record, low = _forecasts(jobs)
    newest = next((one.progress for one in reversed(jobs) if one.progress is not None), None)
    found = room or record
    free_bytes = None if found is None else found.free_bytes
    size_bytes = None if found is None else found.size_bytes
    forecast = low or record
    remaining_s = None if forecast is None else forecast.remaining_s
    output_s = None if record is None else record.remaining_s
    growth = free_bytes / output_s if output_s and free_bytes is not None else math.inf
    return PlaceRoom(
        location=location,
        jobs=tuple((one.place, one.job.name) for one in jobs[: -_MOST_NAMES - 1 : -1]),
        num_jobs=len(jobs),
        free_bytes=free_bytes,
        used_share=1 - min(free_bytes, size_bytes) / size_bytes if size_bytes and free_bytes is not None else None,
        save_bytes=None if newest is None else newest.saves.last_bytes,
        saves_left=None if forecast is None else forecast.saves_left,
        remaining_s=remaining_s,
        growth_bytes_s=growth if math.isfinite(growth) else None,
        is_low=low is not None,
        is_here=is_here,
    )


def _forecasts(jobs: list[ListedJob]) -> tuple[SpaceRecord | None, SpaceRecord | None]:
    """The records of a running job's launcher about its output folder, and about a folder that is nearly full.

    Pods of a cluster post a folder that is nearly full without its place and its path.
    """
    for one in reversed(jobs):
        if one.progress is not None and one.job.state.holds_slots:
            of_output = [record for record in one.progress.space if record.place == OUTPUT_FOLDER]
            low = [
                record for record in one.progress.space if record.is_low and (record in of_output or not record.path)
            ]
            if of_output or low:
                return next(iter(of_output), None), next(iter(low), None)
    return None, None


def _measured(locations: list[str]) -> dict[str, Room]:
    """The size and free space of folders. Folders that were not read in time are left out."""
    found: dict[str, Room] = {}

    def measure() -> None:
        for location in locations:
            with contextlib.suppress(ValueError, OSError):
                place = parse_location(location)
                if place.is_folder and (room := room_of(place.folder)) is not None:
                    found[location] = room

    do_within(measure, _LOOK_S)
    return dict(found)
