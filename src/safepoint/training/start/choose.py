"""Chooses the checkpoint that a run resumes from, and completes it in every folder; all ranks decide together.

The ranks first try the newest checkpoint that any folder or the object store holds. The ranks read all files of this
checkpoint, compare them with the manifest, and report damaged files. A file that a folder lacks is copied from
another folder or from the store. If a checkpoint cannot be completed in every folder, its content is invalid
(`contents`), or the files of its ranks contradict each other, it is rejected, and the next older checkpoint is tried.
If none is left, the newest usable checkpoint of another program is taken (`foreign`). If checkpoints exist and none
of them can be used, the run ends with exit code 14, or 13 if a disk has no room for one of them. To train from step 0
in this case, the user sets an option such as `--from-scratch`. If there is an object store, the user names another
location instead.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from safepoint.checkpoint.foreign.examine import is_foreign
from safepoint.checkpoint.format.catalog import (
    Aside,
    checkpoint_name,
    list_checkpoints,
    planted_checkpoints,
    refuse_invalid,
    refuse_planted,
    step_of,
)
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from safepoint.checkpoint.format.verify import Fault
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.fetch import check_listing
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.errors import CheckpointError, ManifestError, NoRoomError, NothingValidError, UnreadableError
from safepoint.foundation import clock
from safepoint.foundation.events.console import ProgressLine
from safepoint.foundation.events.run_events import (
    CheckpointRejected,
    NewerForeign,
    Resumed,
    ResumedFromForeign,
    ResumedFromMemory,
    SetAside,
)
from safepoint.foundation.events.stream import Event
from safepoint.foundation.events.upload_events import Fetched
from safepoint.foundation.units import plural
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.store import Store
from safepoint.training.collective.collective_wait import long_on_all_ranks, on_all_ranks, on_first_rank
from safepoint.training.collective.peers import Peers
from safepoint.training.start.candidate import Candidate, has_unlisted_files, preference
from safepoint.training.start.contents import with_content
from safepoint.training.start.copies import (
    Examine,
    ListedCopy,
    ResumePoint,
    VerifiedCopy,
    list_copy,
    named_manifest,
    verify_copy,
)
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from safepoint.training.start.foreign import ForeignCheckpoints, Place
from safepoint.training.start.transfer import Transfer, make_plan

_NAME_ANOTHER = "name another checkpoint, or omit --resume to resume from the newest valid one"


class CheckpointChooser:
    """Chooses the checkpoint for one start of the run; all calls are collective.

    Args:
        peers: all ranks.
        output: the folder that this rank uses. The folder's owner (see `Folders`) has claimed it.
        folders: which ranks use which folder.
        store: the object store behind the folders, or None.
        settings: the options `resume` and `from_scratch`. If `resume` names a checkpoint, or `from_scratch` is set,
            the option applies to the first start only. Later starts resume from newer checkpoints.
        first_start: finds out whether this is the first start of the job.
        report: receives the events; see `Reporter.report`.
        examine: see `Examine`.
        reads_foreign: whether the training can load foreign checkpoints: checkpoints that a Trainer without Safepoint
            has written.
    """

    def __init__(
        self,
        peers: Peers,
        output: OutputFolder,
        folders: Folders,
        store: Store | None,
        settings: RunSettings,
        first_start: FirstStart,
        report: Callable[[Event], None],
        *,
        examine: Examine = lambda point: "",
        reads_foreign: bool = False,
    ) -> None:
        self._peers = peers
        self._is_first = peers.place.is_first
        self._output = output
        self._folders = folders
        self._remote = RemoteFolder(store) if store is not None else None
        self._settings = settings
        self._first_start = first_start
        self._report = report
        self._examine = with_content(examine, peers)
        self._no_room: NoRoomError | None = None
        """The error for the newest checkpoint that does not fit on a disk."""
        self._too_large_bytes = 0
        self._transfer = Transfer(peers, output, folders, store)
        self._foreign = ForeignCheckpoints(peers, output, folders, store, self._reject)
        self._reads_foreign = reads_foreign

    def choose(self, in_memory: ResumePoint | None = None) -> ResumePoint | None:
        """Choose the checkpoint to resume from, and complete it in every folder.

        Args:
            in_memory: a snapshot that an earlier start has left, the same on every rank; None if there is no such
                snapshot. The snapshot is chosen if no newer checkpoint can be used. Older checkpoints are not read.

        Returns:
            The checkpoint, with its path on this node; None to begin at step 0.

        Raises:
            NothingValidError: there are checkpoints, and none of them can be used.
            CheckpointError: the checkpoint that `--resume` names is not valid.
            StorageError: the store cannot be read, or a disk has too little free space.
        """
        settings, is_first_start = self._settings, self._first_start.is_now()
        if settings.resume == "never" or (settings.from_scratch and is_first_start):
            self._set_aside_newer_than(-1, with_foreign=True)
            self._first_start.leave_mark()
            return None
        started_s = clock.monotonic_s()
        newer: ResumePoint | None = None
        if in_memory is not None:
            kept = in_memory.manifest
            newer = self._newest_of({step for step in self._steps_in_folders() if step > kept.step})
            if newer is None:
                self._set_aside_newer_than(kept.step)
                self._report(ResumedFromMemory(step=kept.step, num_files=len(kept.files), size_bytes=kept.size_bytes))
                return in_memory
        is_named = settings.resume != "auto"
        foreign = self._foreign.named(settings.resume) if is_named and self._reads_foreign else None
        # If `--resume` names a checkpoint of another program, later starts resume from it too, until a newer
        # checkpoint of Safepoint exists.
        uses_named = is_named and (is_first_start or (foreign is not None and self._is_newest(foreign.step)))
        point = None if uses_named else newer or self._newest(is_named=is_named)
        if point is None and foreign is not None:
            point = self._named_foreign(foreign)
        elif point is None and is_named:
            point = self._named(Path(settings.resume))
        if point is None:
            return None
        # Checkpoints that are newer than the chosen checkpoint cannot be used, or the user has named an older
        # checkpoint. Move the newer checkpoints aside, because later saves may need their names.
        self._set_aside_newer_than(point.manifest.step)
        if is_first_start:
            self._first_start.leave_mark()
        self._report(
            Resumed(
                step=point.manifest.step,
                path=point.foreign.where if point.foreign is not None else str(point.path),
                num_files=len(point.manifest.files),
                size_bytes=point.manifest.size_bytes,
                duration_s=round(clock.monotonic_s() - started_s, 3),
            )
        )
        if point.foreign is not None:
            self._report(
                ResumedFromForeign(step=point.manifest.step, path=point.foreign.where, writer=point.foreign.writer)
            )
        elif self._reads_foreign and not is_named and self._peers.place.restart == 0:
            self._mention_newer_foreign(point.manifest.step)
        return point

    def complete(self, step: int) -> None:
        """Complete the checkpoint of `step` in every folder, because a framework is about to read it there.

        Raises:
            CheckpointError: a file has no valid copy on the nodes or in the store.
            StorageError: the store cannot be read, or a disk has too little free space.
        """
        candidates = self._candidates(step, is_in_store=step in self._steps_in_store())
        if not any(self._complete(candidate) for candidate in candidates):
            raise CheckpointError(f"{checkpoint_name(step)} is complete neither on the nodes nor in the object store")

    # ---- which checkpoint ---------------------------------------------------------------------------------------

    def _newest(self, *, is_named: bool) -> ResumePoint | None:
        num_planted = self._report_planted()
        in_folders, in_store = self._steps_in_folders(), self._steps_in_store()
        steps = in_folders | in_store
        point = self._newest_of(steps, in_store)
        if point is not None or (is_named and not steps):
            return point
        if self._no_room is not None:
            raise self._no_room
        others = self._foreign.places()
        for found in self._foreign.usable() if self._reads_foreign and not is_named else ():
            point = self._try(self._foreign.candidate(found))
            if point is not None:
                return point
        if self._no_room is not None:
            raise self._no_room
        if others and not steps:
            on_first_rank(self._peers, lambda: self._foreign.refuse(others, can_resume=self._reads_foreign))
        if steps and (in_store or not self._folders.is_shared):
            assert self._remote is not None
            raise NothingValidError(
                f"{self._remote.store.location} and the nodes hold {plural(len(steps), 'checkpoint')}, and none of "
                "them is valid and complete; training was not started",
                hint="`safepoint checkpoints verify` lists the faults; to start a new run, name another location",
            )
        if steps:
            on_first_rank(self._peers, lambda: refuse_invalid(self._output.root))
        if num_planted and not (self._settings.from_scratch or self._settings.has_begun or self._peers.place.restart):
            on_first_rank(self._peers, lambda: refuse_planted(self._output.root, num_planted))
        return None

    def _newest_of(self, steps: set[int], in_store: Collection[int] = ()) -> ResumePoint | None:
        found = (self._candidates(step, is_in_store=step in in_store) for step in sorted(steps, reverse=True))
        points = (self._try(one) for ones in found for one in ones)
        return next((point for point in points if point is not None), None)

    def _try(self, candidate: Candidate) -> ResumePoint | None:
        """Complete a checkpoint, and examine it. If it cannot be used, report the reason and return None.

        Raises:
            NoRoomError: a newer checkpoint did not fit on a disk, and is less than twice as large as `candidate`, so
                its size is plausible. With more space, the run can resume from the newer checkpoint.
        """
        if self._no_room is not None and self._too_large_bytes < 2 * candidate.size_bytes:
            raise self._no_room
        point = self._tried(candidate)
        if point is None and candidate.foreign is not None:
            self._foreign.delete_copy()
        return point

    def _tried(self, candidate: Candidate) -> ResumePoint | None:
        try:
            if not self._complete(candidate):
                return None
        except NoRoomError as error:
            if self._no_room is None:
                self._no_room, self._too_large_bytes = error, candidate.size_bytes
            self._reject(self._place_of(candidate.name), Fault(file="its size", reason=error.message))
            return None
        point = self._point(candidate)
        reason = self._examine(point)
        if reason:
            self._reject(self._place_of(candidate.name), Fault(file="its content", reason=reason))
        return None if reason else point

    def _report_planted(self) -> int:
        """Report checkpoints of other users, and return their number.

        Also report the checkpoints that an earlier start did not use and could not move aside.
        """
        output, is_owner = self._output, self._folders.is_owner
        planted = on_all_ranks(self._peers, lambda: planted_checkpoints(output.root) if is_owner else {})
        others = on_all_ranks(self._peers, lambda: output.faults_of_passed_over() if is_owner else {})
        for rank, found in [*enumerate(planted), *enumerate(others)]:
            for path, fault in found.items():
                self._reject(path, fault, rank)
        return sum(map(len, planted))

    def _named_foreign(self, place: Place) -> ResumePoint:
        found = self._foreign.read(place)
        if isinstance(found, Fault):
            raise CheckpointError(
                f"--resume {self._foreign.where(place)} cannot be used: {found}; Safepoint did not write this "
                "checkpoint; training was not started",
                hint=_NAME_ANOTHER,
            )
        try:
            point = self._completed(self._foreign.candidate(found), found.origin.where)
            self._check_named(point, self._foreign.where(place))
        except CheckpointError:
            self._foreign.delete_copy()
            raise
        return point

    def _is_newest(self, step: int) -> bool:
        """Whether every checkpoint of Safepoint is older than `step`."""
        return step > max(self._steps_in_folders() | self._steps_in_store(), default=-1)

    def _mention_newer_foreign(self, step: int) -> None:
        newer = next((place for place in self._foreign.places() if place.step > step), None)
        if newer is not None:
            fault = self._foreign.fault_of(newer)
            self._report(
                NewerForeign(step=newer.step, path=self._foreign.where(newer), resumed_step=step, fault=fault)
            )

    def _named(self, path: Path) -> ResumePoint:
        def check() -> tuple[Manifest, bool, bool] | None:
            if not self._is_first:
                return None
            manifest = named_manifest(path, self._watch())
            return manifest, path.parent.resolve() == self._output.root.resolve(), has_unlisted_files(path)

        checked = long_on_all_ranks(self._peers, check)[0]
        assert checked is not None
        manifest, is_inside, has_unlisted = checked
        if not is_inside:  # the checkpoint is not in the folder, so the checkpoints there belong to another run
            self._set_aside_newer_than(-1)
        point = ResumePoint(path=path, manifest=manifest)
        if has_unlisted or not self._folders.is_shared:
            point = self._completed(Candidate(manifest=manifest, named=path), f"--resume {path}")
        self._check_named(point, path)
        return point

    def _check_named(self, point: ResumePoint, where: object) -> None:
        reason = self._examine(point)
        if reason:
            what = f"--resume {where} cannot be used: {reason}; training was not started"
            raise CheckpointError(what, hint=_NAME_ANOTHER)

    def _completed(self, candidate: Candidate, what: str) -> ResumePoint:
        if not self._complete(candidate):
            raise CheckpointError(f"{what} could not be copied to every node; training was not started")
        return self._point(candidate)

    def _point(self, candidate: Candidate) -> ResumePoint:
        return ResumePoint(path=self._target(candidate), manifest=candidate.manifest, foreign=candidate.foreign)

    def _target(self, candidate: Candidate) -> Path:
        """The folder in which the checkpoint is completed, on every node."""
        return (self._output.root if candidate.foreign is None else self._foreign.copies) / candidate.name

    def _steps_in_folders(self) -> set[int]:
        """The steps of all checkpoints in the output folders, by their names, without foreign checkpoints."""

        def steps() -> list[int]:
            found = self._output.checkpoints() if self._folders.is_owner else []
            return [step for path in found if (step := step_of(path)) is not None and not is_foreign(path)]

        return {step for steps in on_all_ranks(self._peers, steps) for step in steps}

    def _steps_in_store(self) -> set[int]:
        """The steps of the checkpoints in the store that have a manifest, valid or not."""
        remote = self._remote
        return set(on_first_rank(self._peers, lambda: remote.steps() if remote is not None else []))

    def _candidates(self, step: int, *, is_in_store: bool) -> list[Candidate]:
        """The checkpoints of `step` that can perhaps be completed, in the order in which to try them.

        Damaged copies are reported. There can be several checkpoints of one step, written by different attempts.
        """
        folder = self._output.root / checkpoint_name(step)
        listed = on_all_ranks(self._peers, lambda: list_copy(folder) if self._folders.is_owner else None)
        self._report_damaged(listed)
        copies = [copy for copy in listed if copy is not None]
        stored = on_first_rank(self._peers, lambda: self._manifest_in_store(step)) if is_in_store else None
        if isinstance(stored, Fault):
            self._reject(self._place_of(checkpoint_name(step)), stored)
        held = {entry for copy in copies for entry in copy.files}
        manifests = {copy.manifest.to_bytes(): copy.manifest for copy in copies if copy.manifest is not None}
        candidates = [
            Candidate(manifest=manifest)
            for manifest in manifests.values()
            if manifest != stored and held >= set(manifest.files)
        ]
        if isinstance(stored, Manifest):
            candidates.append(Candidate(manifest=stored, is_in_store=True))
        if not candidates and stored is None and all(copy.fault is None for copy in copies):
            fault = Fault(file="the checkpoint", reason="the parts of other nodes are missing")
            self._reject(self._place_of(checkpoint_name(step)), fault)
        # If the store has a checkpoint of this step, checkpoints of the same run come first. Then newer attempts come
        # first. Within one attempt, manifests with more files come first.
        run_id = stored.run_id if isinstance(stored, Manifest) else None
        return sorted(candidates, key=lambda candidate: preference(candidate.manifest, run_id), reverse=True)

    def _manifest_in_store(self, step: int) -> Manifest | Fault:
        assert self._remote is not None
        try:
            manifest = self._remote.manifest(step)
            check_listing(self._remote.store, checkpoint_name(step), manifest)
        except (ManifestError, UnreadableError) as error:
            return Fault(file=MANIFEST_NAME, reason=str(error))
        except CheckpointError as error:
            return Fault(file="its content", reason=str(error))
        return manifest

    # ---- into every folder --------------------------------------------------------------------------------------

    def _complete(self, candidate: Candidate, *, is_retry: bool = False) -> bool:
        """Complete the checkpoint in every folder. If that is not possible, report the reason and return False."""
        started_s = clock.monotonic_s()
        copies = self._verify_copies(candidate)
        plan = make_plan(candidate.manifest, copies, folders=self._folders, is_in_store=candidate.is_in_store)
        if plan is None:  # a file has no good copy; `_verify_copies` has reported the damaged copies
            return False
        own = copies.get(self._peers.place.rank)
        is_in_the_way = own is not None and not (own.is_complete or own.is_replaceable or candidate.foreign)
        try:
            self._transfer.carry_out(
                plan,
                before_commit=lambda: self._make_way(candidate, is_in_the_way=is_in_the_way),
                target=self._target(candidate),
            )
        except CheckpointError as error:
            # A file that was verified as good may be damaged by the time it is read again. So verify once more.
            if not self._folders.is_shared and not is_retry:
                return self._complete(candidate, is_retry=True)
            self._reject(self._place_of(candidate.name), Fault(file="its content", reason=str(error)))
            return False
        fetched_bytes = sum(window.size_bytes for window in plan.fetchers)
        if fetched_bytes:
            self._report(
                Fetched(
                    step=candidate.manifest.step,
                    location=str(self._place_of(candidate.name)),
                    size_bytes=fetched_bytes,
                    duration_s=round(clock.monotonic_s() - started_s, 3),
                )
            )
        return True

    def _verify_copies(self, candidate: Candidate) -> dict[int, VerifiedCopy]:
        """Verify the copy in each owner's folder: read all of its files, and report damaged copies.

        Returns:
            Owner → its copy.
        """
        folder = self._target(candidate)

        def verify() -> VerifiedCopy | None:
            if not self._folders.is_owner:
                return None
            if candidate.named is not None and self._is_first:  # this copy was verified before; see `Candidate`
                return VerifiedCopy(
                    path=candidate.named,
                    good=frozenset(entry.path for entry in candidate.manifest.files),
                    is_complete=candidate.named.resolve() == folder.resolve() and not has_unlisted_files(folder),
                    is_replaceable=False,
                )
            return verify_copy(folder, candidate.manifest, self._watch())

        verified = long_on_all_ranks(self._peers, verify)
        self._report_damaged(verified)
        return {owner: copy for owner, copy in enumerate(verified) if copy is not None}

    def _set_aside_newer_than(self, step: int, *, with_foreign: bool = False) -> None:
        """Move checkpoints that are newer than `step` aside, in every folder; all of them if `step` is -1. Foreign
        checkpoints are moved only if `with_foreign` is True."""
        self._set_aside(lambda path: (step_of(path) or 0) > step and (with_foreign or not is_foreign(path)))

    def _make_way(self, candidate: Candidate, *, is_in_the_way: bool) -> None:
        """Move the incomplete copies of a checkpoint aside, before the complete checkpoint gets their name.

        Raises:
            CheckpointError: a copy cannot be moved.
        """
        for left in self._set_aside(lambda path: is_in_the_way and path.name == candidate.name):
            raise CheckpointError(
                f"the incomplete copy {left} cannot be moved aside, so the complete checkpoint cannot be stored there"
            )

    def _set_aside(self, is_chosen: Callable[[Path], bool]) -> list[Path]:
        """Move checkpoints aside in every folder.

        Checkpoints that cannot be moved stay, but are no longer treated as checkpoints.

        Returns:
            The checkpoints that could not be moved, of all folders.
        """

        def move() -> Aside:
            found = list_checkpoints(self._output.root) if self._folders.is_owner else []
            return self._output.set_aside([path for path in found if is_chosen(path)])

        asides = on_all_ranks(self._peers, move)
        most = max(asides, key=lambda aside: aside.num_moved)
        if most.place is not None:
            self._report(SetAside(num_checkpoints=most.num_moved, path=str(most.place)))
        for rank, aside in enumerate(asides):
            for path, reason in aside.left.items():
                why = f"it cannot be moved aside ({reason}), so it stays, and does not count as a checkpoint"
                what = f"until you move it away, step {step_of(path)} cannot be saved"
                self._reject(path, Fault(file="the folder", reason=f"{why}; {what}"), rank)
        return [path for aside in asides for path in aside.left]

    # ---- events -------------------------------------------------------------------------------------------------

    def _report_damaged(self, copies: Sequence[ListedCopy | VerifiedCopy | None]) -> None:
        for rank, copy in enumerate(copies):
            if copy is not None and copy.fault is not None:
                self._reject(copy.path, copy.fault, rank)

    def _reject(self, where: object, fault: Fault, rank: int = 0) -> None:
        reason = f"{fault.reason} (on rank {rank})" if rank else fault.reason
        self._report(CheckpointRejected(path=str(where), file=fault.file, reason=reason))

    def _place_of(self, name: str) -> object:
        return self._remote.store.location.child(name) if self._remote is not None else self._output.root / name

    def _watch(self) -> Callable[[int, int], None] | None:
        return ProgressLine("verifying").update if self._is_first else None
