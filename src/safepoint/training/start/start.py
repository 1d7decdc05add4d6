"""How the ranks of an attempt start together: with one checkpoint, one attempt number, and every folder claimed.

The job has one folder that all ranks share, or several folders and an object store (docs/adr/0017). The owner of each
folder claims the folder and deletes the files that ended runs left there. The first rank claims the store. Then all
ranks together choose the checkpoint, and complete it in every folder. An error on any rank is raised on every rank.
"""

import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.format.manifest import Manifest
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.errors import UsageError
from safepoint.foundation.events.start_events import ResumedFromOtherRun
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.storage.store import Store
from safepoint.training.collective.collective_wait import on_all_ranks, on_first_rank
from safepoint.training.collective.peers import Peers
from safepoint.training.context.outputs import open_checked
from safepoint.training.context.rank_context import RankContext
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.claim import (
    Attempt,
    StoreClaim,
    claim_folder,
    join_store,
    names_to_upload,
    open_in_keeper,
    start_uploader,
)
from safepoint.training.start.copies import Examine, ResumePoint
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders, find_folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where this rank starts.

    Args:
        point: the checkpoint to resume from, by its path on this node, or None for step 0.
        attempt: the number and the identifiers of this attempt.
        folders: one shared folder, or several.
        complete: completes the checkpoint of a step in every folder; all ranks call it. None if there is one folder.
    """

    point: ResumePoint | None
    attempt: Attempt
    folders: Folders
    complete: Callable[[int], None] | None = None


def agree_on_start(
    context: RankContext,
    peers: Peers,
    output: OutputFolder,
    location: Location | None = None,
    *,
    examine: Examine,
    reads_foreign: bool = False,
) -> Start:
    """Claim the folders, and choose the checkpoint; a collective call.

    Args:
        context: the context of this rank.
        peers: all ranks.
        output: the output folder, by its path on this rank.
        location: the object store to which checkpoints are uploaded, or None.
        examine: see `Examine`.
        reads_foreign: whether the training can load checkpoints that a Trainer without Safepoint has written.

    Raises:
        SafepointError: why the run cannot start, the same on every rank.
    """
    context.keeper.open(peers.secret)
    folders = find_folders(peers, output, has_store=location is not None)
    # Call `_recall` before `claim`, which deletes working folders: until `_recall` returns, the keeper (the process
    # that writes snapshots) may write to a working folder.
    in_memory = on_first_rank(peers, lambda: _recall(context) if folders.is_shared else None)
    store: Store | None = None

    def claim() -> None:
        nonlocal store
        if location is not None:
            store = _open_store(context, location, folders)
        if folders.is_owner:
            if not folders.is_shared:
                context.reporter.warns_for_node = True
            claim_folder(context, output)
            if location is not None:
                join_store(context, output, location)

    on_all_ranks(peers, claim)
    store_claim = StoreClaim(context, RemoteFolder(store)) if store is not None else None
    first_start = FirstStart(peers, output, store, context.settings)
    if store_claim is not None:
        is_first = first_start.is_now()
        on_first_rank(peers, lambda: store_claim.begin(is_first_start=is_first))
    chooser = CheckpointChooser(
        peers,
        output,
        folders,
        store,
        context.settings,
        first_start,
        context.reporter.report,
        examine=examine,
        reads_foreign=reads_foreign,
    )
    point = chooser.choose(in_memory)
    context.outcome.resumed_from = point.path if point is not None else None

    def to_upload() -> list[str]:
        has_uploader = folders.is_owner and store is not None
        return names_to_upload(output, with_parts=not folders.is_shared) if has_uploader else []

    names = {name for names in on_all_ranks(peers, to_upload) for name in names}
    is_named = context.settings.resume != "auto" and first_start.is_now()

    def begin_attempt() -> Attempt:
        if point is not None and point.foreign is None and not is_named:
            _report_other_run(context, output, store_claim, point)
        return _begin_attempt(output, store_claim, point, names)

    attempt = on_first_rank(peers, begin_attempt)

    def open_folder() -> None:
        if folders.is_owner:
            output.open_attempt(attempt.attempt_id)
            if location is not None:
                start_uploader(context, output, location, attempt, folders)

    on_all_ranks(peers, open_folder)
    keeper = context.keeper.client
    if folders.is_shared and keeper is not None:
        error = open_in_keeper(keeper, context.place, output)
        if error:
            context.log.warning("%s: saves are synchronous", error)
            context.keeper.disable()
    context.reporter.share_stream(output.events)
    return Start(
        point=point, attempt=attempt, folders=folders, complete=None if folders.is_shared else chooser.complete
    )


def _open_store(context: RankContext, location: Location, folders: Folders) -> Store:
    # The first rank has checked the access already, at the beginning. The owners on other nodes check it here.
    is_tried = context.place.is_first or not folders.is_owner
    try:
        if is_tried or not context.settings.verify_access:
            return open_store(location)
        return open_checked(location)
    except ValueError as error:
        raise UsageError(f"{error}; training was not started") from error


def _recall(context: RankContext) -> ResumePoint | None:
    """The snapshot that the ranks left in the keeper's memory before their restart; None if there is none."""
    keeper = context.keeper.client
    recalled = keeper.find_earlier_snapshot() if keeper is not None and context.place.restart > 0 else None
    if recalled is None:
        return None
    manifest = Manifest.from_bytes(recalled.manifest.encode())
    return ResumePoint(path=Path(recalled.folder), manifest=manifest, is_durable=recalled.is_durable)


def _report_other_run(
    context: RankContext, output: OutputFolder, claim: StoreClaim | None, point: ResumePoint
) -> None:
    """Report if the checkpoint does not belong to the run that used the location last."""
    last = [one for one in (claim.last_run if claim is not None else None, output.last_run()) if one is not None]
    run_id = point.manifest.run_id
    if last and run_id not in last:
        context.reporter.report(
            ResumedFromOtherRun(step=point.manifest.step, path=str(point.path), run_id=run_id, last_run_id=last[0])
        )


def _begin_attempt(
    output: OutputFolder, claim: StoreClaim | None, point: ResumePoint | None, to_upload: Collection[str]
) -> Attempt:
    """Number the attempt, record it in the folder, and claim the store for it. Called on the first rank."""
    run_id = point.manifest.run_id if point else uuid.uuid4().hex
    after = point.manifest.attempt if point else 0
    if claim is not None:
        after = max(after, claim.last_attempt_of(run_id))
    number = output.next_attempt(run_id, after=after)
    attempt_id = f"{run_id[:8]}-{number}-{uuid.uuid4().hex[:8]}"
    passed_over: tuple[int, ...] = ()
    if claim is not None:
        from_step = point.manifest.step if point else -1
        passed_over = tuple(step for step in claim.remote.steps() if step > from_step)
        claim.complete(run_id, number, attempt_id, keep=to_upload)
    return Attempt(run_id=run_id, attempt=number, attempt_id=attempt_id, passed_over=passed_over)
