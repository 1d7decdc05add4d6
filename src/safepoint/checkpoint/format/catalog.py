"""The checkpoints in an output folder, and the checkpoint to resume from.

A checkpoint is a folder `checkpoint-<step>`. The checkpoint with the highest step counts as the newest. So a run that
resumes from an older checkpoint, or from none, first moves the checkpoints with higher steps aside (see `set_aside`).

In a folder that others may write to and that has the sticky bit, such as /tmp, checkpoints of other users do not
count (see `planted_checkpoints`). If they counted, another user could decide which checkpoint a run resumes from, and
which of its checkpoints the run deletes.
"""

import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from safepoint.checkpoint.format.manifest import MANIFEST_NAME, PART_NAME, Manifest
from safepoint.checkpoint.format.verify import Fault, has_record, verify
from safepoint.errors import NothingValidError, UsageError
from safepoint.foundation import clock
from safepoint.foundation.files import fsync_folder
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.ownership import is_of_stranger, is_planted, user_name
from safepoint.foundation.units import plural

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint of `step`; the Trainer uses the same name."""
    return f"checkpoint-{step}"


def step_of(path: Path) -> int | None:
    """The step in the name of a folder; None if the folder does not have the name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def list_checkpoints(output: Path) -> list[Path]:
    """The paths in `output` that have the name of a checkpoint, newest first. They need not be valid. Paths that do
    not count because they belong to other users are left out."""
    return [path for path in _list_named(output) if not is_of_stranger(path)]


def planted_checkpoints(output: Path) -> dict[Path, Fault]:
    """The checkpoints of other users, which `list_checkpoints` leaves out: newest first, each with the reason."""
    return {path: _fault_of_owner(path) for path in _list_named(output) if is_of_stranger(path)}


def _fault_of_owner(path: Path) -> Fault:
    try:
        owner = user_name(path.lstat().st_uid)
    except OSError:
        owner = "unknown"
    return Fault(
        file="the folder",
        reason=f"it belongs to another user ({owner}), and others may write to the folder that contains it. To use "
        f"it, copy it to a folder that only you can write to, and name the copy with --resume",
    )


def _list_named(output: Path) -> list[Path]:
    try:
        found = [(step, path) for path in output.iterdir() if (step := step_of(path)) is not None]
    except FileNotFoundError:
        return []
    return [path for _, path in sorted(found, reverse=True)]


def refuse_inside_checkpoint(folder: Path) -> None:
    """Refuse a folder that must not receive new files, because it belongs to a checkpoint or to Safepoint.

    A folder that contains a valid manifest counts as a checkpoint. A folder with the name of a checkpoint counts even
    if its manifest is damaged. A manifest in a folder that everyone can write to, such as /tmp, is ignored if another
    user may have put it there. With such a manifest, that user could stop all runs below this folder.

    Raises:
        UsageError: `folder` is a committed checkpoint or `.safepoint`, or is inside one of these.
    """
    real = Path(os.path.realpath(folder))
    for place in (real, *real.parents):
        is_committed = _is_committed(place)
        if is_committed or place.name == ".safepoint":
            what = "a checkpoint" if is_committed else "Safepoint's own folder"
            raise UsageError(
                f"{folder} belongs to {what}, {place}; nothing was written",
                hint=f"name a folder outside of {place}; for a run, use --output-dir {place.parent}",
            )


def _is_committed(folder: Path) -> bool:
    found = [path for name in (MANIFEST_NAME, PART_NAME) if os.path.isfile(path := folder / name)]
    if not any(not is_planted(path) for path in found):
        return False
    return step_of(folder) is not None or has_record(folder)


def newest_valid(output: Path, *, rejected: Callable[[Path, Fault], None]) -> tuple[Path, Manifest] | None:
    """Find the newest checkpoint that is valid, see `verify`.

    Args:
        output: the output folder.
        rejected: called with each checkpoint that is skipped, because it is damaged or belongs to another user, and
            with its first fault.

    Returns:
        Path and manifest; None if no path in the folder has the name of a checkpoint.

    Raises:
        NothingValidError: checkpoints exist, and none of them is valid, or all of them belong to other users.
    """
    planted = planted_checkpoints(output)
    for path, fault in planted.items():
        rejected(path, fault)
    candidates = list_checkpoints(output)
    for path in candidates:
        verdict = verify(path)
        if verdict.manifest is None or not verdict.is_valid:
            rejected(path, verdict.faults[0])
        elif fault := fault_of_step(verdict.manifest, path):
            rejected(path, fault)
        else:
            return path, verdict.manifest
    if candidates:
        refuse_invalid(output)
    if planted:
        refuse_planted(output, len(planted))
    return None


def fault_of_step(manifest: Manifest, folder: Path) -> Fault | None:
    """The fault of a checkpoint whose step differs from the step in its folder's name; None if both are equal."""
    if manifest.step == step_of(folder):
        return None
    reason = f"its step is {manifest.step}, and the folder's name has step {step_of(folder)}"
    return Fault(file=MANIFEST_NAME, reason=reason)


def refuse_planted(output: Path, num_planted: int) -> NoReturn:
    """Raise the error for a folder in which all checkpoints belong to other users.

    Raises:
        NothingValidError: always.
    """
    raise NothingValidError(
        f"{output} holds only {plural(num_planted, 'checkpoint')} of other users, and others may write to "
        "this folder; training was not started",
        hint="name a folder that only you can write to; to start at step 0 in this folder, use --from-scratch",
    )


def refuse_invalid(output: Path) -> NoReturn:
    """Raise the error that explains why no checkpoint in `output` can be resumed from.

    Raises:
        NothingValidError: always.
    """
    found = list_checkpoints(output)
    if all(os.path.exists(path / PART_NAME) for path in found):
        raise NothingValidError(
            f"{output} holds only this node's parts of {plural(len(found), 'checkpoint')}; training was not started",
            hint="start the run on all nodes, with --output-dir s3://… as before",
        )
    if not any(os.path.exists(path / MANIFEST_NAME) for path in found):
        raise NothingValidError(
            f"{output} holds {plural(len(found), 'checkpoint folder')} without a manifest; training was not started",
            hint="`safepoint checkpoints list` shows which folders another program wrote, and which have lost their "
            "manifest; to start at step 0, use --from-scratch, which moves the folders aside and deletes nothing",
        )
    raise NothingValidError(
        f"{output} holds {plural(len(found), 'checkpoint folder')} and no valid checkpoint; training was not started",
        hint="restore a checkpoint, or start at step 0 with --from-scratch, which moves the folders aside and "
        "deletes nothing",
    )


def lacks_record(path: Path) -> bool:
    """Whether `path` has the name of a checkpoint, but no manifest or record: Safepoint did not commit it."""
    return (
        step_of(path) is not None
        and os.path.isdir(path)
        and not any(os.path.lexists(path / name) for name in (MANIFEST_NAME, PART_NAME))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Aside:
    """The result of `set_aside`.

    Args:
        place: the new folder; None when nothing was moved.
        num_moved: how many checkpoints are in it now.
        left: the checkpoints that could not be moved, each with the reason.
    """

    place: Path | None = None
    num_moved: int = 0
    left: Mapping[Path, str] = field(default_factory=dict[Path, str])


def set_aside(output: Path, paths: Sequence[Path]) -> Aside:
    """Move `paths` into a new folder `set-aside-<time>-<4 characters>` in `output`. Nothing is deleted.

    A path that cannot be moved, such as an immutable folder or a mount point, stays. The others are moved.

    Raises:
        OSError: the new folder cannot be created, or the moves cannot be made durable.
    """
    if not paths:
        return Aside()
    stamp = re.sub(r"[^0-9TZ]", "", clock.utc_now().split(".")[0]) + "Z"
    place = output / f"set-aside-{stamp}-{uuid.uuid4().hex[:4]}"
    place.mkdir()
    left: dict[Path, str] = {}
    for path in paths:
        try:
            no_links.rename(path, place / path.name, below=output)
        except OSError as error:
            left[path] = error.strerror or str(error)
    if len(left) == len(paths):
        place.rmdir()
        return Aside(left=left)
    fsync_folder(place)
    fsync_folder(output)
    return Aside(place=place, num_moved=len(paths) - len(left), left=left)
