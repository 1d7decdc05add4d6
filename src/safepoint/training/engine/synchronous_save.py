"""Saves for which the training waits: all ranks together write the files into a working folder and commit them.

The keeper (the process that writes snapshots to disk) is not involved. A failed save leaves no files. The failure is
reported, and every rank treats the save as failed.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

from safepoint.checkpoint.commit import Record, commit
from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import FileEntry, Manifest, NodePart, Trigger
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.local.retention import Policy, parse_policies, prune
from safepoint.checkpoint.local.thinning import is_full, make_room
from safepoint.checkpoint.local.working_checkpoint import (
    RankPart,
    WorkingCheckpoint,
    extend_manifest,
    find_added_files,
    merge_parts,
    replace_record,
)
from safepoint.errors import ManifestError, SafepointError, SaveError
from safepoint.foundation import clock
from safepoint.foundation.events.run_events import Resealed, Saved, SaveFailed
from safepoint.foundation.volumes.occupied import Occupied, occupied
from safepoint.training.collective.collective_wait import on_first_rank
from safepoint.training.engine.loop import Write
from safepoint.training.engine.setup import TrainingSetup

_T = TypeVar("_T")


class SynchronousSave:
    """The synchronous saves of one training.

    Args:
        setup: the facts of the training.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._context = setup.context
        self._peers = setup.peers
        self._folders = setup.start.folders
        self._newest: tuple[Path, Manifest] | None = None

    def save(self, trigger: Trigger, write: Write, *, consequence: str) -> float | None:
        """Save the state at the loop's step, on all ranks together.

        Args:
            trigger: why the state is saved.
            write: writes this rank's files.
            consequence: what a failure means for the training. The message about the failure ends with this text.

        Returns:
            How many seconds the save took; None on every rank if nothing was committed.

        Raises:
            PeerError: a rank is gone.
        """
        started_s, time = clock.monotonic_s(), clock.utc_now()
        step = self._setup.loop.step
        working = self._setup.working_checkpoint()
        manifest, reason = None, ""
        try:
            manifest = self._commit(working, self._write_parts(working, write), trigger)
        except SaveError as error:
            reason = str(error)
        if self._folders.is_owner:
            working.discard()
        if manifest is None:
            self._context.reporter.report(
                SaveFailed(step=step, trigger=trigger, reason=reason, consequence=consequence)
            )
            self._context.progress.not_saved()
            return None
        self._newest = (working.target, manifest)
        self._context.outcome.saved(step)
        took_s = clock.monotonic_s() - started_s
        self._context.progress.saved(
            step, time=time, stall_s=took_s, durable_s=took_s, size_bytes=manifest.size_bytes
        )
        self._context.reporter.report(
            Saved(
                step=step,
                trigger=trigger,
                path=str(working.target),
                num_files=len(manifest.files),
                size_bytes=manifest.size_bytes,
                duration_s=round(took_s, 3),
            )
        )
        return took_s

    def _commit(self, working: WorkingCheckpoint, parts: Sequence[RankPart], trigger: Trigger) -> Manifest:
        """Commit the files to the folder that all ranks share, or each node's files to its folder.

        Raises:
            SaveError: nothing was committed; the same on every rank.
        """
        manifest = on_first_rank(self._peers, lambda: merge_parts(parts, self._setup.describe(trigger)))
        commit(working, self._record(parts, manifest), together=self._on_owners)
        return manifest

    def _record(self, parts: Sequence[RankPart], manifest: Manifest) -> Record:
        if self._folders.is_shared:
            return manifest
        node = self._folders.index
        paths = tuple(sorted(entry.path for part in parts if part.node == node for entry in part.files))
        is_open = self._setup.loop.has_callbacks
        return NodePart(node=node, num_nodes=self._folders.count, paths=paths, manifest=manifest, is_open=is_open)

    def _on_owners(self, work: Callable[[], _T]) -> list[_T]:
        """Call `work` on every rank that owns a folder (see `Folders`); a collective call.

        Returns:
            The results, in the order of the owners.

        Raises:
            SaveError: the errors of all owners; the same on every rank.
        """
        outcome: tuple[_T | None, str] | None = None
        if self._folders.is_owner:
            try:
                outcome = work(), ""
            except (SafepointError, OSError, ValueError) as error:
                outcome = None, str(error) if self._folders.is_shared else f"node {self._folders.index}: {error}"
        outcomes = [outcome for outcome in self._peers.gather(outcome) if outcome is not None]
        problem = "; ".join(reason for _, reason in outcomes if reason)
        if problem:
            raise SaveError(problem)
        return [cast("_T", result) for result, _ in outcomes]

    def close_parts(self, step: int) -> None:
        """Close the parts of this step's checkpoint on all nodes. Their upload then no longer waits for added files.

        Callbacks can still add files afterwards; `adopt_added_files` extends the manifest. This method does nothing
        if the keeper has saved the step, or if the nodes share a folder. All ranks call this method.
        """
        is_saved_here = self._newest is not None and self._newest[1].step == step
        if is_saved_here and not self._folders.is_shared and self._setup.loop.has_callbacks:
            self.adopt_added_files()

    def adopt_added_files(self) -> None:
        """Extend the newest checkpoint's manifest: list the files that callbacks of any rank have added."""
        self._peers.gather(None)  # wait until the callbacks of all ranks have written their files
        try:
            found = self._on_owners(self._find_added_files)
            added = [entry for entries in found for entry in entries]
            # With several folders, the record of each node was written as open (`NodePart.is_open`). The record has
            # to be written again as closed, even if no file was added.
            if added or not self._folders.is_shared:
                self._on_owners(lambda: self._name_added_files(added, found[self._folders.index]))
        except SaveError as error:
            if self._newest is not None:
                _, manifest = self._newest
                reason = f"files that a callback added cannot be listed in the manifest: {error}"
                consequence = "resuming will skip this checkpoint"
                self._context.reporter.report(
                    SaveFailed(step=manifest.step, trigger=manifest.trigger, reason=reason, consequence=consequence)
                )
            return
        if added and self._newest is not None:
            paths = sorted({entry.path for entry in added})
            self._context.reporter.report(Resealed(step=self._newest[1].step, files=tuple(paths)))

    def _find_added_files(self) -> list[FileEntry]:
        return find_added_files(*self._newest) if self._newest is not None else []

    def _name_added_files(self, added: Sequence[FileEntry], here: Sequence[FileEntry]) -> None:
        if self._newest is None:
            return
        path, manifest = self._newest
        # If two nodes have added files with the same name, the manifest lists only the file of the first of them.
        whole = extend_manifest(manifest, added)
        replace_record(path, whole, [entry for entry in here if entry in whole.files])
        self._newest = path, whole

    def _write_parts(self, working: WorkingCheckpoint, write: Write) -> list[RankPart]:
        """Write the files of all ranks; a collective call.

        If the files would not fit, older checkpoints are deleted first, as far as the policies allow (see
        `thinning`). If the disk was full while the files were written, further checkpoints are deleted, and all files
        are written again.

        Raises:
            SaveError: a folder cannot be changed; the same on every rank.
        """
        self._on_owners(self._make_room)
        while True:
            parts = self._peers.gather(self._write_part(working, write))
            if all(part.error is None for part in parts):
                return parts
            # Frameworks may hide the error of a full disk behind another error. So the free space is measured after
            # any error.
            was_full = any(part.is_full and part.node == self._folders.index for part in parts)

            def try_again(has_failed: bool = was_full) -> bool:
                working.discard()
                return self._make_room(has_failed=has_failed) > 0

            if not any(self._on_owners(try_again)):
                return parts

    def _make_room(self, *, has_failed: bool = False) -> int:
        """If the save would not fit into this folder, delete older checkpoints; see `thinning.make_room`.

        The save is expected to be as large as the newest checkpoint that is known to be complete. With several
        folders, the other nodes have that checkpoint too, so older parts can be deleted.
        """
        newest = self._newest_complete
        if newest is None:
            return 0
        return make_room(
            self._setup.output,
            self._policies,
            self._context.reporter.report,
            save=self._expected(newest),
            protected={*self._protected, newest.step},
            run_id=newest.run_id,
            has_failed=has_failed,
        )

    def _expected(self, newest: Manifest) -> Occupied:
        """What the next save will occupy in this folder: as much as the newest checkpoint."""
        found = occupied(self._setup.output.root / checkpoint_name(newest.step))
        if not self._folders.is_shared:
            return found
        # `found` leaves out files that have a second name (hard links).
        num_inodes = max(found.num_inodes, len(newest.files))
        return Occupied(num_bytes=max(found.num_bytes, newest.size_bytes), num_inodes=num_inodes)

    @property
    def _newest_complete(self) -> Manifest | None:
        """The newest checkpoint of this run that is known to be complete in all folders."""
        if self._newest is not None:
            return self._newest[1]
        point = self._setup.start.point
        is_own = point is not None and point.is_durable and point.foreign is None
        is_same_run = point is not None and point.manifest.run_id == self._setup.start.attempt.run_id
        return point.manifest if point is not None and is_own and is_same_run else None

    @property
    def _policies(self) -> tuple[Policy, ...]:
        limit, _ = self._setup.loop.retention()
        return parse_policies(self._context.settings.keep, limit)

    @property
    def _protected(self) -> set[int]:
        return self._setup.loop.retention()[1]

    def _write_part(self, working: WorkingCheckpoint, write: Write) -> RankPart:
        rank = self._context.place.rank
        try:
            root = working.rank_root(rank)
            write(root, root / working.name)
            return working.seal(rank, node=self._folders.index)
        except Exception as error:  # noqa: BLE001  gathered, so that no other rank waits forever
            reason = f"rank {rank}: {type(error).__name__}: {error}"
            return RankPart(rank=rank, node=self._folders.index, error=reason, is_full=is_full(error))

    def set_newest(self, path: Path) -> None:
        """Record that the keeper has committed the newest checkpoint. It is at `path`."""
        with contextlib.suppress(ManifestError):
            self._newest = (path, read_manifest(path))

    def prune(self) -> None:
        """Delete the checkpoints that neither the script's own limit (`save_total_limit`) nor the settings keep."""
        if self._folders.is_owner:
            # The checkpoint that was just saved stays, whatever else is in the folder.
            newest = () if self._newest is None else (self._newest[1].step,)
            prune(
                self._setup.output,
                self._policies,
                self._context.reporter.report,
                protected={*self._protected, *newest},
                run_id=self._setup.start.attempt.run_id,
            )
