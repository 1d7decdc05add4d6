"""Thinning: deletes old checkpoints before a save, if the save would not fit.

Retention deletes checkpoints after a save. If the next save would not fit, thinning deletes more checkpoints before
this save: `newest=N` then counts as `newest=1`. Thinning deletes the oldest checkpoints first, and only as many as
necessary. Checkpoints that `every`, `best` or `younger` keep stay. If no policy sets a limit, all checkpoints stay.
As in retention, these always stay: the newest checkpoint, the newest valid checkpoint, checkpoints that a process
reads or uploads, checkpoints that the caller protects, and checkpoints of other runs and programs.

A folder that does not state its free space, or does not answer, is not thinned before the save. If the save then
fails because the disk or a quota is full, `is_full` returns True for the error. In this case, the caller deletes one
checkpoint and tries again.
"""

import contextlib
import errno
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import KeepNewest, Policy, delete_one
from safepoint.foundation.bounded import Work
from safepoint.foundation.events.space_events import Thinned
from safepoint.foundation.events.stream import Event
from safepoint.foundation.units import format_bytes, plural
from safepoint.foundation.volumes.occupied import Occupied, occupied
from safepoint.foundation.volumes.room import Limit, Room, room_of

_LIMIT_S = 5.0
"""The time limit, in seconds, for reading the free space of a folder before a save."""
_SPARE_BYTES, _SPARE_SHARE, _SPARE_INODES = 1 << 20, 1 / 64, 16
"""Space for the manifest, for folders, and for the data that the file system adds to the files."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


def with_spare(save: Occupied) -> Occupied:
    """The space that must be free for a save whose files occupy `save`."""
    return Occupied(
        num_bytes=round((1 + _SPARE_SHARE) * save.num_bytes) + _SPARE_BYTES,
        num_inodes=save.num_inodes + _SPARE_INODES,
    )


def under_pressure(policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """The policies that apply if a save does not fit: `policies`, with `newest=1` in place of `newest=N`."""
    return tuple(KeepNewest(1) if isinstance(policy, KeepNewest) else policy for policy in policies)


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or the error that caused it, says that a disk or a quota is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__
    return False


def make_room(
    output: OutputFolder,
    policies: Sequence[Policy],
    report: Callable[[Event], None],
    *,
    save: Occupied,
    protected: Collection[int] = (),
    run_id: str,
    has_failed: bool = False,
    read_room: Callable[[Path], Room | None] = room_of,
) -> int:
    """If a save does not fit, delete checkpoints until it fits, and report each deletion.

    If the save would not fit even after all these deletions, nothing is deleted, and no error is
    raised: the save itself will fail.

    Args:
        output: the folder. The caller is the only process that commits and prunes there.
        policies: the retention policies of the run.
        report: receives the events.
        save: the space that the files of the save will occupy.
        protected: steps that are never deleted.
        run_id: the run. Only its checkpoints may be deleted.
        has_failed: whether the save was tried, and the disk or a quota was full. Then one checkpoint is deleted,
            even if there seems to be enough space: a quota may be smaller than the file system.
        read_room: measures the free space.

    Returns:
        The number of deleted checkpoints.
    """
    if not any(policy.is_limit for policy in policies):
        return 0
    needed = with_spare(save)
    room = _measure(output.root, read_room)
    if not has_failed and (room is None or _fits(room, needed)):
        return 0
    deletable = list(_deletable(output, policies, protected, run_id))
    if room is not None and not _fits(_plus(room, [freed for _, freed in deletable]), needed):
        return 0
    done: list[Occupied] = []
    for step, frees in deletable:
        reason = "the disk, or a quota, was full during a save"
        if room is not None and not _fits(room, needed):
            reason = f"the next save would not fit: {_shortage(room, needed)}"
        if not delete_one(output, step, report):
            continue
        report(Thinned(step=step, path=output.where(checkpoint_name(step)), reason=reason))
        done.append(frees)
        # A file system may free the space of deleted files later. Until then it still reports the old free space.
        measured = _measure(output.root, read_room)
        if room is None or measured is None or _fits(measured, needed) or _fits(_plus(room, done), needed):
            break
    return len(done)


def _deletable(
    output: OutputFolder, policies: Sequence[Policy], protected: Collection[int], run_id: str
) -> Iterator[tuple[int, Occupied]]:
    """The steps that may be deleted, oldest first, each with the space that its deletion frees."""
    with contextlib.suppress(OSError):  # if the folder cannot be read, the pruning after the save reports it
        for step in output.superseded(under_pressure(policies), protected=protected, run_id=run_id):
            if not output.is_in_use(checkpoint_name(step)):
                yield step, occupied(output.root / checkpoint_name(step))


def _measure(folder: Path, read_room: Callable[[Path], Room | None]) -> Room | None:
    try:
        return Work(lambda: read_room(folder)).result(_LIMIT_S)
    except OSError:
        return None


def _fits(room: Room, needed: Occupied) -> bool:
    has_inodes = room.free_inodes is None or room.free_inodes >= needed.num_inodes
    return room.free_bytes >= needed.num_bytes and has_inodes


def _plus(room: Room, freed: Sequence[Occupied]) -> Room:
    num_bytes, num_inodes = sum(one.num_bytes for one in freed), sum(one.num_inodes for one in freed)
    inodes = None if room.free_inodes is None else room.free_inodes + num_inodes
    return Room(free_bytes=room.free_bytes + num_bytes, free_inodes=inodes, limit=room.limit)


def _shortage(room: Room, needed: Occupied) -> str:
    if room.free_bytes >= needed.num_bytes:
        return f"it needs {plural(needed.num_inodes, 'inode')}, and {room.free_inodes} are free"
    limits = {
        Limit.DISK: "are free",
        Limit.EVICTION: "are free before the node evicts the pod",
        Limit.SIZE_LIMIT: "are left of the size limit of the volume",
    }
    return f"it needs {format_bytes(needed.num_bytes)}, and {format_bytes(room.free_bytes)} {limits[room.limit]}"
