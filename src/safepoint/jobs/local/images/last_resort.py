"""Freezes the launchers of a run into a process image at the deadline, if the ranks cannot save in time.

A rank can hang in C code, or evaluate for longer than the grace period. Then there is no checkpoint of the running
step, and `--freeze-as-last-resort` makes an image instead. The image is made by the process that has forwarded the
stop request to the launchers. This process is outside of their trees, so it can freeze them.

The last part of the grace period is reserved for the image. The length of this part follows from the size of the
processes. The ranks read this length, and finish or give up their step before the reserved time begins.
"""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safepoint.foundation import clock
from safepoint.foundation.processes import tree_of, user_of
from safepoint.foundation.units import format_bytes, format_duration
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import Location
from safepoint.training.outcome.launcher_folder import note_frozen, reserve, running_launchers, was_frozen
from safepoint.training.outcome.rank_record import newest_records
from safepoint.transparent.criu.trees import environment_of, resident_bytes

if TYPE_CHECKING:
    from safepoint.transparent.freeze import Frozen
    from safepoint.transparent.images.location import ImageLocation

_BASE_S = 3.0
_BYTES_PER_S = 100e6
"""How much a very busy machine with two cores freezes, compresses and commits in a second
(docs/process-images.md)."""
_LOOK_EVERY_S, _LOOK_EARLY_S = 5.0, 0.1
_ENDING_S = 0.5
"""The time that ranks may take to end, after they have saved in time."""
_COPIES = re.compile(r"safepoint_(?:program|code|packages)_[a-z0-9_]{8}")
"""The folders to which a pod copies Safepoint, the code and the packages of a job; see `pod_archive`."""
_log = logging.getLogger("safepoint")


def needed_s(num_bytes: int) -> float:
    """The approximate time for an image of processes, in seconds, from the first stopped process to the commit.

    Args:
        num_bytes: the memory of the processes, in bytes.
    """
    return _BASE_S + num_bytes / _BYTES_PER_S


class LastResort:
    """Watches the launchers of one run.

    Args:
        settings: the options of the run; `grace_s` is the grace period that this process itself has.
        roots: the pids of the launchers, by node.
        images: the folder for the image.
    """

    def __init__(self, settings: RunSettings, roots: Sequence[int], images: Path) -> None:
        self._settings = settings
        self._roots = list(roots)
        self._images = images
        self._look_at_s = 0.0
        self._reserved_s = min(_BASE_S + _ENDING_S, self._within_s / 2)
        self._has_warned = False
        self._is_tried = False
        self.folders: list[Path] = []
        """The temporary folders of the launchers, as `look` has found them."""

    def look(self) -> None:
        """Reserve time for an image of the processes as they are now, every few seconds. Call this often."""
        if clock.monotonic_s() < self._look_at_s or self._is_tried:
            return
        folders = self._folders()
        # A launcher makes its folder before its ranks start, so the ranks find the record as soon as they start.
        self.folders = folders
        is_early = len(folders) < len(self._roots)
        self._look_at_s = clock.monotonic_s() + (_LOOK_EARLY_S if is_early else _LOOK_EVERY_S)
        if is_early:
            return
        num_bytes = resident_bytes(pid for root in self._roots for pid in tree_of(root))
        wanted_s = needed_s(num_bytes) + _ENDING_S
        most_s = self._within_s / 2
        self._reserved_s = min(wanted_s, most_s)
        for folder in folders:
            reserve(folder, self._reserved_s)
        if wanted_s > most_s and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "an image of these processes (%s) may take %s, and at most %s of the grace period are left for it: "
                "an image at the deadline may not be complete in time; set --grace to %s or more, if the platform "
                "allows this",
                format_bytes(num_bytes),
                format_duration(wanted_s),
                format_duration(most_s),
                format_duration(2.5 * wanted_s),
            )

    def is_due(self, asked_s: float | None) -> bool:
        """Whether it is time for the image: ranks still run, and the reserved time begins.

        Args:
            asked_s: when the launchers were asked to stop; None if they were not.
        """
        if asked_s is None or self._is_tried:
            return False
        if clock.monotonic_s() < asked_s + self._within_s - self._reserved_s + _ENDING_S:
            return False
        records = [record for folder in self._folders() for record in newest_records(folder).values()]
        return bool(records) and all(record.exit_code is None for record in records)

    def freeze(self, before_end: Callable[[str], None]) -> "Frozen":
        """Freeze the launchers. There is only one try. If it fails, the launchers run on, and end at their deadline.

        Args:
            before_end: called with the path of the image when it is committed, before the processes are ended.

        Raises:
            SafepointError, OSError: there is no image, and the processes run on.
        """
        from safepoint.transparent.criu.program import find_criu
        from safepoint.transparent.freeze import freeze_trees

        self._is_tried = True
        folders = self._folders()
        for folder in folders:
            note_frozen(folder, is_frozen=True)
        try:
            with images_in(self._images) as location:
                return freeze_trees(
                    find_criu(),
                    self._roots,
                    location,
                    is_running_after=False,
                    carried=carried_folders(self._roots),
                    before_end=lambda manifest: before_end(location.where(manifest.name)),
                )
        except BaseException:
            for folder in folders:
                note_frozen(folder, is_frozen=False)
            raise

    @property
    def _within_s(self) -> float:
        return self._settings.grace_s - self._settings.margin_s

    def _folders(self) -> list[Path]:
        return [folder for folders in temporary_folders_of(self._roots).values() for folder in folders]


def were_late(roots: Sequence[int]) -> bool:
    """Whether launchers were restored from an image that was made at their deadline."""
    return any(was_frozen(folder) for folders in temporary_folders_of(roots).values() for folder in folders)


def temporary_folders_of(roots: Sequence[int]) -> dict[int, list[Path]]:
    """The temporary folders of the launchers in process trees, by the root of the tree.

    Args:
        roots: the pids of the root processes.
    """
    launchers = running_launchers()
    return {root: [folder for folder, pid in launchers if pid in tree] for root in roots for tree in [tree_of(root)]}


def carried_folders(roots: Sequence[int]) -> dict[int, list[Path]]:
    """The folders that are restored with the launchers in process trees, by the root of the tree.

    They are the temporary folders of the launchers and, in a pod, the folders with the programs that they run.

    Args:
        roots: the root processes.
    """
    return {root: [*folders, *_copies_of(root)] for root, folders in temporary_folders_of(roots).items()}


def _copies_of(pid: int) -> list[Path]:
    if user_of(pid) != os.getuid():  # another user could name any folder, and make this process wait for ever
        return []
    paths = environment_of(pid).get("PYTHONPATH", "").split(os.pathsep)
    with contextlib.suppress(OSError):
        paths.append(os.readlink(f"/proc/{pid}/cwd"))
    found = {one for path in paths for one in (Path(path), *Path(path).parents) if _COPIES.fullmatch(one.name)}
    return sorted(found)


@contextlib.contextmanager
def images_in(folder: Path) -> "Generator[ImageLocation]":
    """The images in a folder, with this user's key."""
    from safepoint.transparent.images.opening import key_of, open_images  # imports numpy

    with open_images(Location.of_folder(folder), key_of(None, is_made=True), only_authentic=True) as location:
        yield location
