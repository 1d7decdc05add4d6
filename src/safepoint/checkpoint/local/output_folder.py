"""The folder that a run writes to: its lock, its checkpoints, and the leftovers of ended runs.

A run claims the folder: it locks the folder, so that no other run can use it. The keeper is the process of each node
that writes snapshots to disk.
"""

import contextlib
import errno
import itertools
import json
import os
import stat
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safepoint.checkpoint.format.catalog import (
    Aside,
    checkpoint_name,
    list_checkpoints,
    refuse_inside_checkpoint,
    set_aside,
    step_of,
)
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, MAX_ATTEMPT, PART_NAME, Manifest
from safepoint.checkpoint.format.verify import Fault, has_all_files, is_newer_format, read_manifest_of_any
from safepoint.checkpoint.local.passed_over import NOTES_NAME, add_notes, is_noted, read_notes
from safepoint.checkpoint.local.retention import Candidate, Policy, select_superseded
from safepoint.errors import ConflictError, ManifestError, StorageError, UsageError, printable
from safepoint.foundation import clock, files
from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.configuration import xdg_folder
from safepoint.foundation.environment import host_name
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.leases import Lease, lease_on
from safepoint.foundation.shared_folders.ownership import is_of_stranger, is_planted, is_planted_folder

_MOST_UNKNOWN_LEASES = 2


class OutputFolder:
    """The folder that a run writes to: checkpoints by name, and Safepoint's own files under `.safepoint/`.

    Args:
        root: the folder; need not exist yet.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.control = root / no_links.CONTROL
        self.work = self.control / "work"
        self.trash = self.control / "trash"
        self.events = self.control / "events.jsonl"
        self.progress = self.control / "progress.json"
        self.keeper_lock = self.control / "keeper"
        """The lock file that the keeper holds while it writes here, even if the run that claimed the folder died."""
        self._lock: files.FolderLock | None = None

    def check_usable(self) -> None:
        """Create the folder if it does not exist, but create nothing inside it.

        Raises:
            StorageError: the folder cannot be created, is a file, or another user may have put it there.
            UsageError: the folder is a checkpoint or is inside one, or has the name of a checkpoint.
        """
        self._create_root("; training was not started")

    def _create_root(self, consequence: str = "") -> None:
        refuse_inside_checkpoint(self.root)
        if step_of(self.root) is not None:
            raise UsageError(
                f"the output folder {self.root} has the name of a checkpoint; nothing was written",
                hint=f"name the folder that contains it: {self.root.parent}",
            )
        is_strange = is_planted(self.root)
        if not is_strange:
            try:
                _make_cache_private(self.root)
                files.make_folder(self.root)
            except OSError as error:
                raise self._unusable(error, consequence) from error
            # Check again, because another user may have just made the folder.
            is_strange = is_planted_folder(self.root)
        if is_strange:
            raise StorageError(
                f"the output folder {self.root}, or a folder above it, belongs to another user and is in a folder "
                f"that everyone may write to{consequence or '; nothing was changed'}",
                hint="name another folder",
            )

    def _unusable(self, error: OSError, consequence: str = "") -> StorageError:
        is_file = isinstance(error, NotADirectoryError | FileExistsError)
        what = "is not a folder" if is_file else "cannot be used"
        return StorageError(
            f"the output folder {self.root} {what}: {error.strerror}{consequence}", hint="name a writable folder"
        )

    def check_control(self) -> None:
        """Refuse links and special files among Safepoint's own files: writes to them would go outside the folder.

        Also refuse a file in the place of one of Safepoint's own folders, and a folder `.safepoint` that a
        stranger may have made: it belongs to another user or cannot be read, and others may write to the output
        folder.

        Raises:
            StorageError: there is a link, a special file, or a file in the place of a folder; or a stranger
                may have made `.safepoint`.
        """
        if is_of_stranger(self.control):
            raise StorageError(
                f"{self.control} belongs to another user, and others may write to {self.root}; nothing was changed",
                hint="name another output folder",
            )
        found = [self.control]
        try:
            while found:
                path = found.pop()
                with contextlib.suppress(FileNotFoundError):  # another process has deleted this working file
                    status = path.lstat()
                    if stat.S_ISDIR(status.st_mode):
                        found += path.iterdir() if path == self.control else []
                    elif not stat.S_ISREG(status.st_mode):
                        raise StorageError(
                            f"{printable(str(path))} is a link or a special file, and Safepoint would write through "
                            "it to a place outside the output folder; nothing was changed",
                            hint="delete it or replace it by a copy, or name another output folder",
                        )
                    elif path in {self.control, self.work, self.trash}:
                        raise StorageError(
                            f"{printable(str(path))} is a file, and Safepoint needs a folder with this name; nothing "
                            "was changed",
                            hint="delete or move the file, or name another output folder",
                        )
        except OSError as error:
            raise self._unusable(error) from error

    def create(self) -> None:
        """Create the folder, and Safepoint's own folders in it, if they do not exist.

        Raises:
            StorageError: a folder cannot be created, or see `check_control`.
            UsageError: see `check_usable`.
        """
        self._create_root()
        self.check_control()
        try:
            files.make_folder(self.work)
            files.make_folder(self.trash)
        except OSError as error:
            raise self._unusable(error) from error

    def prepare(self) -> None:
        """Create the folders as `create` does, and check that files can be written there.

        Raises:
            StorageError: a folder cannot be created or written, or see `check_control`.
            UsageError: see `check_usable`.
        """
        self.create()
        try:
            probe = self.trash / uuid.uuid4().hex  # a unique name, because other ranks may call `prepare` now too
            files.write_atomic(probe, b"", durable=False)
            no_links.unlink(probe)
        except OSError as error:
            raise self._unusable(error) from error

    def claim(self, *, wait_s: float, waiting: Callable[[str], None], keeper: str = "") -> bool:
        """Lock the folder for this run. If another run holds it, wait, because that run may be about to exit.

        Args:
            wait_s: how many seconds to wait for another run.
            waiting: called once, when the wait begins, with a description of the process that holds the folder.
            keeper: the identity of this run's keeper; empty if the run has none. If this keeper still holds the
                folder from an earlier start of the run, the claim does not wait for it.

        Returns:
            Whether the file system supports locks. Without locks, `clean` must not be called: another run may be
                active.

        Raises:
            ConflictError: another run still holds the folder.
            StorageError: the lock cannot be opened, or see `check_control`.
        """
        path = self.control / "lock"
        # A run that is refused because of this lock shows these values in its message.
        owner = {"pid": os.getpid(), "host": host_name(), "since": clock.utc_now()}
        deadline = clock.monotonic_s() + wait_s
        is_reported = False
        while True:
            held = path
            try:
                self._lock = files.FolderLock.acquire(path, owner)
                held = self.keeper_lock
                self._check_keeper(keeper)
                self.check_control()  # check again, because the process that had the lock may have put links there
            except StorageError:
                self.release()
                raise
            except BlockingIOError as error:
                self.release()
                holder = files.read_lock_owner(held)
                pid, host, since = (printable(str(holder.get(name, "?"))) for name in ("pid", "host", "since"))
                who = f"pid {pid} on {host} since {since}"
                if clock.monotonic_s() >= deadline:
                    raise ConflictError(
                        f"{self.root} is in use by another run ({who}); nothing was changed",
                        hint="stop that run first, or name another output folder",
                    ) from error
                if not is_reported:
                    waiting(who)
                    is_reported = True
                clock.sleep(0.2)
            except OSError as error:
                self.release()
                raise self._unusable(error) from error
            else:
                return self._lock is not None

    def _check_keeper(self, keeper: str) -> None:
        """Check that no other run's keeper still writes to the folder.

        Raises:
            BlockingIOError: a keeper other than `keeper` still writes.
        """
        if not files.is_locked(self.keeper_lock):
            return
        if not keeper or files.read_lock_owner(self.keeper_lock).get("keeper") != keeper:
            raise BlockingIOError(errno.EAGAIN, "held by a keeper", str(self.keeper_lock))

    def release(self, attempt_id: str | None = None) -> None:
        """Release the lock for the next run. If `attempt_id` is given, first delete the attempt's working folder."""
        if attempt_id is not None and self._lock is not None:
            with contextlib.suppress(OSError):  # if this fails, the next start deletes the folder
                files.delete_tree(self.work / attempt_id)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def clean(self) -> int:
        """Delete the working folders and temporary files of ended runs. Requires that `claim` has returned True.

        If a run ended while it replaced a checkpoint, the replaced checkpoint gets its name back.

        Returns:
            The number of deleted folders and files.

        Raises:
            StorageError: a file cannot be deleted, or another process has replaced a folder by a link.
        """
        files.restore_replaced(self.root, trash=self.trash, is_name=lambda name: step_of(Path(name)) is not None)
        found = [(self.work.name, "*"), (self.trash.name, "*"), (".", ".*.????????????????????????????????")]
        control = self.control.name
        try:
            return sum(files.delete_entries(self.root, control, name, pattern=pattern) for name, pattern in found)
        except OSError as error:
            raise self._unusable(error) from error

    def next_attempt(self, run_id: str, *, after: int) -> int:
        """Number this attempt of the run, record the number in the folder, and return it. Requires `claim`.

        Args:
            run_id: the identifier of the run.
            after: the attempt that wrote the checkpoint to resume from; 0 for none.
        """
        record = self._last_attempt()
        number = record.get("attempt")
        counted = 0
        if record.get("run_id") == run_id and type(number) is int and 0 < number <= MAX_ATTEMPT:
            counted = number
        attempt = min(max(counted, after) + 1, MAX_ATTEMPT)
        path = self.control / "attempt.json"
        files.write_atomic(path, json.dumps({"run_id": run_id, "attempt": attempt}).encode(), durable=True)
        return attempt

    def last_run(self) -> str | None:
        """The run that used the folder last, by the record of `next_attempt`; None if there is no record."""
        run_id = self._last_attempt().get("run_id")
        return run_id if isinstance(run_id, str) else None

    def _last_attempt(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return read_object(self.control / "attempt.json")
        return {}

    def open_attempt(self, attempt_id: str) -> None:
        """Create the working folder of an attempt.

        Only this user may enter the working folder. So another user who may write to the output folder cannot replace
        folders inside the working folder by links while a framework saves there.
        """
        no_links.make_folder(self.work / attempt_id, 0o700)

    def set_aside(self, paths: Sequence[Path]) -> Aside:
        """Move checkpoints aside; see `catalog.set_aside`. Requires `claim`.

        Checkpoints that cannot be moved are passed over from now on; see `passed_over`.
        """
        aside = set_aside(self.root, paths)
        # `pass_over` also deletes the notes of checkpoints that were moved.
        if aside.left or (aside.num_moved and read_notes(self.control)):
            self.pass_over(aside.left)
        return aside

    def pass_over(self, paths: Iterable[Path]) -> None:
        """Record that the checkpoints at `paths` no longer count as checkpoints; see `passed_over`.

        Requires `claim`.
        """
        add_notes(self.control, paths)

    def passed_over(self) -> list[Path]:
        """The checkpoints that a run has passed over and could not move aside."""
        notes = read_notes(self.control)
        return [path for path in list_checkpoints(self.root) if is_noted(path, notes)]

    def faults_of_passed_over(self) -> dict[Path, Fault]:
        """The checkpoints of `passed_over`, each with the reason why it does not count."""
        reason = (
            f"an earlier start did not use it and could not move it aside, so {self.control / NOTES_NAME} names it. "
            "Move the checkpoint away, or delete that file to use the checkpoint again"
        )
        return {path: Fault(file="the folder", reason=reason) for path in self.passed_over()}

    def checkpoints(self) -> list[Path]:
        """The paths with the name of a checkpoint, newest first, without checkpoints that were passed over."""
        notes = read_notes(self.control)
        return [path for path in list_checkpoints(self.root) if not is_noted(path, notes)]

    def manifests(self) -> Iterator[tuple[Path, Manifest]]:
        """The committed checkpoints and parts with their manifests, newest first; not verified.

        A checkpoint is left out if its manifest cannot be read, or has another step than the folder's name.
        Manifests can be large. They are read one after the other, so that a caller need not hold all of them.
        """
        for path in self.checkpoints():
            with contextlib.suppress(ManifestError):
                manifest = None if path.is_symlink() else read_manifest_of_any(path)
                if manifest is not None and manifest.step == step_of(path):
                    yield path, manifest

    # ---- see `retention.CheckpointFolder`; deadlines are ignored: a file system call cannot be cancelled -------

    def steps(self, *, deadline_s: float | None = None) -> list[int]:
        """The steps of the committed checkpoints and parts, newest first; not verified."""
        return [manifest.step for _, manifest in self.manifests()]

    def superseded(
        self,
        policies: Sequence[Policy],
        *,
        protected: Collection[int] = (),
        run_id: str | None = None,
        deadline_s: float | None = None,
    ) -> list[int]:
        """The steps that no policy keeps, oldest first; see `select_superseded`."""
        candidates = [Candidate.of(manifest, policies) for _, manifest in self.manifests()]
        return select_superseded(
            candidates,
            policies,
            now_s=clock.wall_s(),
            protected=protected,
            # Names and sizes are enough: digests were computed during the write, and to read all files would delay a
            # save.
            is_good=lambda step: has_all_files(self.root / checkpoint_name(step)),
            run_id=run_id,
        )

    def delete(self, name: str, *, deadline_s: float | None = None) -> bool:
        """See `CheckpointFolder`."""
        if self.is_in_use(name) or is_newer_format(self.root / name):
            return False
        files.discard(self.root / name, trash=self.trash)
        return True

    def where(self, name: str) -> str:
        """The checkpoint's path."""
        return str(self.root / name)

    def is_in_use(self, name: str) -> bool:
        """Whether a process reads or uploads the checkpoint, or the part, called `name`.

        True if an error prevents this process from reading the locks.

        If the holder of the lock is unknown, only the newest two checkpoints with such a lock count as in use. If all
        counted, everyone who may read the folder (in another container, for example) could prevent all deletions,
        until the disk is full.
        """
        lease = self._lease_on(name)
        if lease is not Lease.UNKNOWN:
            return lease is not Lease.NONE
        newer = itertools.takewhile(lambda other: other != name, (path.name for path in list_checkpoints(self.root)))
        unknown = (other for other in newer if self._lease_on(other) is Lease.UNKNOWN)
        return len(list(itertools.islice(unknown, _MOST_UNKNOWN_LEASES))) < _MOST_UNKNOWN_LEASES

    def _lease_on(self, name: str) -> Lease:
        found = {lease_on(self.root / name / record) for record in (MANIFEST_NAME, PART_NAME)}
        return next(
            (lease for lease in (Lease.READER, Lease.UNREADABLE, Lease.UNKNOWN) if lease in found), Lease.NONE
        )


def _make_cache_private(root: Path) -> None:
    """If an output folder is in the user's cache folder, as the default for an object store is, make the missing
    folders above it private."""
    with contextlib.suppress(UsageError, StorageError):  # this user has no home folder, and so no cache folder
        cache = xdg_folder("XDG_CACHE_HOME", ".cache") / "safepoint"
        if root.is_relative_to(cache):
            files.make_private_folder(root.parent)
