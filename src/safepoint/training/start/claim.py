"""Claims the output folder and the location in the object store, so that this run is their only writer."""

import os
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import MAX_ATTEMPT, PART_NAME, Trigger
from safepoint.checkpoint.format.verify import is_newer_format
from safepoint.checkpoint.local.final_model import final_folder
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.publish import finish_parts
from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.checkpoint.remote.uploader_process import UploaderPlan
from safepoint.errors import ConflictError, printable
from safepoint.foundation import clock
from safepoint.foundation.bounded_json import MAX_BYTES
from safepoint.foundation.environment import Place, host_name
from safepoint.foundation.files import delete_tree, write_atomic
from safepoint.foundation.quantities import parse_bytes
from safepoint.foundation.shared_folders.opening import read_regular
from safepoint.foundation.units import plural
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.storage.location import Location
from safepoint.training.context.rank_context import RankContext
from safepoint.training.start.folders import Folders
from safepoint.training.start.foreign import step_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The identity of one start of a run. All ranks agree on it before the first step.

    Args:
        run_id: names the run, and is the same in all its attempts.
        attempt: which start of the run this is, from 1.
        attempt_id: names this attempt's working folders.
        passed_over: the steps in the object store that are newer than the checkpoint that the attempt resumes from.
            If the attempt starts at step 0, these are all steps in the object store.
    """

    run_id: str
    attempt: int
    attempt_id: str
    passed_over: tuple[int, ...] = ()


def claim_folder(context: RankContext, output: OutputFolder) -> None:
    """Claim this rank's output folder, and delete the working files that ended runs left there.

    Raises:
        ConflictError: another run uses the folder.
        StorageError: the folder cannot be used.
    """
    output.prepare()
    context.reporter.write_to(output.events)
    keeper = context.keeper.client
    has_locks = output.claim(
        wait_s=context.settings.grace_s,
        waiting=lambda who: context.log.info("waiting for an earlier run to leave %s (%s)", output.root, who),
        keeper=keeper.identity if keeper is not None else "",
    )
    if has_locks:
        output.clean()
    else:
        context.log.warning(
            "the file system of %s has no locks: files of ended runs are not deleted, and two runs in this folder "
            "would not notice each other",
            output.root,
        )


def open_in_keeper(keeper: KeeperClient, place: Place, output: OutputFolder) -> str:
    """Make the node's keeper (the process that writes snapshots to disk) write to the claimed folder.

    On ranks other than the first rank of a node, this does nothing.

    Returns:
        Why the keeper cannot write to the folder; empty if it can.
    """
    if place.local_rank != 0:
        return ""
    # If several nodes share the folder, the keeper of node 0 commits their checkpoints (makes them valid). This
    # keeper holds the lock of the folder even after the ranks have ended.
    return keeper.open_folder(str(output.root.absolute()), is_committer=place.node == 0)


def join_store(context: RankContext, output: OutputFolder, location: Location) -> None:
    """Record the object store in the output folder, before any checkpoint in the folder is used.

    The function also ends the uploads of the previous training in this process, and deletes the final model that an
    earlier training left in the folder.

    Raises:
        ConflictError: the folder holds the checkpoints of another location.
    """
    note = output.control / "location"
    try:
        noted = read_regular(note, MAX_BYTES).decode()
    except (OSError, ValueError):
        noted = ""
    if noted and noted != str(location) and any(output.manifests()):
        raise ConflictError(
            f"the folder {output.root} holds checkpoints of {printable(noted[:2000])}, and this run's location is "
            f"{location}; training was not started and nothing was changed",
            hint="name another folder with --local-dir. If the run is to continue from these checkpoints, first copy "
            f"them to its location: `safepoint checkpoints copy {output.root} {location}`",
        )
    write_atomic(note, str(location).encode(), durable=False)
    context.uploads.close_training()
    if not is_newer_format(final_folder(output)):
        delete_tree(final_folder(output))


class StoreClaim:
    """The claim on the object store, which only the first rank makes.

    The location is claimed twice. The first claim comes before a checkpoint is chosen, so that no earlier attempt
    adds or deletes a checkpoint meanwhile. The second claim comes when the run and the attempt are known.

    Args:
        context: the context of this rank.
        remote: the checkpoints at the location.
    """

    def __init__(self, context: RankContext, remote: RemoteFolder) -> None:
        self._context = context
        self.remote = remote
        self._before: Claim | None = None

    def begin(self, *, is_first_start: bool) -> None:
        """Claim the location, and commit the checkpoints that all nodes have uploaded and no node has committed.

        Args:
            is_first_start: whether `resume` or `from_scratch` applies to this start; see `FirstStart.is_now`.

        Raises:
            ConflictError: with these settings, the run would not resume from the checkpoints at the location; or
                another start has claimed the location first.
        """
        if is_first_start:
            _check_resumes(self._context, self.remote)
        self._before = self.remote.claimed_by()
        run_id = self._before.run_id if self._before else uuid.uuid4().hex
        attempt = min(self.last_attempt_of(run_id) + 1, MAX_ATTEMPT)
        self._claim(run_id, attempt, f"{run_id[:8]}-starting-{uuid.uuid4().hex[:8]}")
        for name in finish_parts(self.remote):
            self._context.log.info("%s was uploaded by all nodes, and is committed now", name)

    def last_attempt_of(self, run_id: str) -> int:
        """The number of the attempt that had claimed the location before this start.

        The result is 0 if there is no such attempt, or if it does not belong to the run `run_id`.
        """
        return self._before.attempt if self._before is not None and self._before.run_id == run_id else 0

    @property
    def last_run(self) -> str | None:
        """The run that had claimed the location before this start; None if there is no such run."""
        return self._before.run_id if self._before is not None else None

    def complete(self, run_id: str, attempt: int, attempt_id: str, *, keep: Collection[str]) -> None:
        """Claim the location for the attempt, and delete unfinished objects of earlier attempts.

        Args:
            run_id: the identifier of the run.
            attempt: the number of the attempt.
            attempt_id: the text that identifies the attempt.
            keep: names of checkpoints that nodes will upload, or have begun to upload. Their objects are kept.
        """
        self._claim(run_id, attempt, attempt_id)
        in_store = {checkpoint_name(step) for step in self.remote.steps()}
        num_deleted = self.remote.clean(keep=set(keep) - in_store)
        if num_deleted:
            location = self.remote.store.location
            self._context.log.info(
                "deleted %s of ended runs in %s", plural(num_deleted, "unfinished object"), location
            )

    def _claim(self, run_id: str, attempt: int, attempt_id: str) -> None:
        self.remote.claim(
            Claim(run_id=run_id, attempt=attempt, attempt_id=attempt_id, since=clock.utc_now(), host=host_name())
        )


def names_to_upload(output: OutputFolder, *, with_parts: bool) -> list[str]:
    """The names of the checkpoints that the uploader of this folder will upload.

    The uploader skips periodic checkpoints that are not the newest, so their unfinished objects in the store need not
    be kept.

    Args:
        output: the folder.
        with_parts: whether to include checkpoints of which the folder holds only one node's part.
    """
    found = [
        (path, manifest.trigger)
        for path, manifest in output.manifests()
        if with_parts or not os.path.exists(path / PART_NAME)
    ]
    return [path.name for index, (path, trigger) in enumerate(found) if index == 0 or trigger != Trigger.PERIODIC]


def start_uploader(
    context: RankContext, output: OutputFolder, location: Location, attempt: Attempt, folders: Folders
) -> None:
    """Start this folder's uploader.

    Args:
        context: the context of this rank.
        output: the folder.
        location: the object store.
        attempt: the attempt that has claimed the folder and the store.
        folders: how many output folders the run has, and from which folder this uploader uploads. If there are
            several folders, each uploader uploads one part of a checkpoint.
    """
    settings = context.settings
    plan = UploaderPlan(
        folder=str(output.root.absolute()),
        location=str(location),
        attempt_id=attempt.attempt_id,
        run_id=attempt.run_id,
        keep=settings.store_keep,
        node=folders.index,
        num_nodes=folders.count,
        extra_bytes=parse_bytes(settings.extra_files_limit),
        passed_over=attempt.passed_over,
        grace_s=settings.grace_s - settings.margin_s,
        verbosity=settings.verbosity,
        events=str(settings.job_events) if settings.job_events else None,
    )
    context.uploads.start(plan)


def _check_resumes(context: RankContext, remote: RemoteFolder) -> None:
    """Refuse options with which the run would not resume from the store's checkpoints.

    In a folder, Safepoint would move these checkpoints aside. In an object store, Safepoint cannot move them.
    """
    settings = context.settings
    named = step_in(remote.store.location, settings.resume)
    if named is not None and named in remote.foreign_steps() and named > max(remote.steps(), default=-1):
        return
    steps = remote.steps() + remote.foreign_steps()
    if steps:
        option = "--from-scratch" if settings.from_scratch else f"--resume {settings.resume}"
        raise ConflictError(
            f"{remote.store.location} holds checkpoints up to step {max(steps)}, and {option} would not resume from "
            "them; training was not started and nothing was changed",
            hint="name another location, or first delete this location with the object store's own tools",
        )
