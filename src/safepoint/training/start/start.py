"""How the ranks of an attempt begin together: one checkpoint, one attempt number, everybody's folder claimed.

Where all ranks share a folder, the first one claims it, cleans up after dead runs, picks and verifies the checkpoint;
the others take its answer, or its refusal. Where every node has a folder of its own, in front of an object store, one
rank of each node claims its own, and the checkpoint is put together from all of them (`assembling`).
"""

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from safepoint.checkpoint.format.manifest import Manifest
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.errors import SafepointError, UsageError
from safepoint.foundation.environment import host_name
from safepoint.foundation.events.console import ProgressLine
from safepoint.foundation.events.run_events import AttemptStarted, RankStarted
from safepoint.storage.location import Location
from safepoint.storage.store import Store
from safepoint.training.collective.collective_wait import agree, attempt
from safepoint.training.collective.peers import Peers
from safepoint.training.context.rank_context import RankContext
from safepoint.training.context.store_access import open_tried
from safepoint.training.start.assemble import Assembling
from safepoint.training.start.claim import (
    OutputClaim,
    claim_folder,
    join_store,
    names_to_upload,
    open_on_node,
    start_mover,
)
from safepoint.training.start.fetch import Fetching, FetchOrder
from safepoint.training.start.folders import Folders, find_folders
from safepoint.training.start.resume import ResumePoint, choose

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What all ranks agree on before the first step.

    Args:
        run_id: the run, the same over all its attempts.
        attempt: which start of the run this is, from 1.
        attempt_id: names this attempt's working folders.
        passed_over: steps in the object store that were found damaged.
    """

    run_id: str
    attempt: int
    attempt_id: str
    passed_over: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How this rank begins.

    Args:
        point: the checkpoint to go on from, by its path on this node, or None for step 0.
        attempt: see `Attempt`.
        folders: one shared folder, or one on every node.
        bring: puts the checkpoint of a step together on every node, all ranks calling it; None where all ranks see
            every checkpoint anyway.
    """

    point: ResumePoint | None
    attempt: Attempt
    folders: Folders
    bring: Callable[[int], None] | None = None


def agree_on_start(
    context: RankContext, peers: Peers, output: OutputFolder, location: Location | None = None
) -> Start:
    """Begin, all ranks together.

    Args:
        context: this rank.
        peers: all ranks.
        output: the folder, by the path that this rank has for it.
        location: the object store behind it, or None.

    Raises:
        SafepointError: why the run cannot begin, the same on every rank.
    """
    context.keeper.open()
    folders = find_folders(peers, output, has_store=location is not None)
    if folders.is_shared or location is None:
        start = _start_on_one_folder(context, peers, output, location, folders)
        _open_for_keeper(context, output)
    else:
        start = _start_on_many_folders(context, peers, output, location, folders)
    context.reporter.share_stream(output.events)
    return start


def begin_figures(
    context: RankContext, start: Start, output: OutputFolder, location: Location | None, *, global_batch: int
) -> None:
    """The attempt's progress begins where it goes on.

    Args:
        context: this rank.
        start: what was agreed on.
        output: the folder.
        location: the object store behind it, or None.
        global_batch: samples of all ranks in a step.
    """
    point = start.point
    context.progress.begin(
        output.progress,
        location=str(location or ""),
        run_id=start.attempt.run_id,
        attempt=start.attempt.attempt,
        samples_per_step=global_batch,
        resumed_step=point.manifest.step if point is not None else None,
        resumed_time=point.manifest.created if point is not None and point.is_durable else None,
        resumed_bytes=point.manifest.size_bytes if point is not None else None,
    )


def announce(context: RankContext, peers: Peers, attempt: Attempt, *, global_batch: int) -> None:
    """Tell that the attempt begins, and which processes it has; all ranks call it.

    Raises:
        PeerError: a rank is gone.
    """
    ranks = peers.gather(RankStarted(rank=context.place.rank, pid=os.getpid(), host=host_name()))
    context.reporter.report(
        AttemptStarted(
            attempt=attempt.attempt,
            run_id=attempt.run_id,
            world_size=context.place.world_size,
            global_batch=global_batch,
            ranks=tuple(ranks),
        )
    )


# ---- one folder -------------------------------------------------------------------------------------------------


def _start_on_one_folder(
    context: RankContext, peers: Peers, output: OutputFolder, location: Location | None, folders: Folders
) -> Start:
    fetching = None if location is None else Fetching(context, peers, output, location)
    answer: Start | SafepointError | FetchOrder | None = None
    if context.place.is_first:
        answer = attempt(lambda: _decide(context, output, fetching, folders), context.place.rank)
    answer = peers.from_first(answer)
    while isinstance(answer, FetchOrder):
        assert fetching is not None
        fetching.serve(answer)
        answer = peers.from_first(None)
    if isinstance(answer, SafepointError):
        raise answer
    assert answer is not None
    return Start(point=answer.point, attempt=answer.attempt, folders=folders)


def _decide(context: RankContext, output: OutputFolder, fetching: Fetching | None, folders: Folders) -> Start:
    # Before the folder is cleaned up: the keeper may still be writing what the last start has left.
    in_memory = _recall(context)
    claim_folder(context, output)
    claiming = None
    if fetching is not None:
        join_store(context, output, fetching.remote.store.location)
        claiming = OutputClaim(context, fetching.remote)
        claiming.begin()
    point = choose(
        output,
        context.settings,
        restart=context.place.restart,
        report=context.reporter.report,
        progress=ProgressLine("verifying").update,
        elsewhere=fetching.newer_than if fetching else None,
        in_memory=in_memory,
    )
    attempt = _count_attempt(output, claiming, fetching.remote if fetching else None, point)
    output.open_attempt(attempt.attempt_id)
    if claiming is not None and fetching is not None:
        claiming.complete(attempt.run_id, attempt.attempt, attempt.attempt_id, keep=names_to_upload(output))
        start_mover(
            context,
            output,
            fetching.remote.store.location,
            attempt_id=attempt.attempt_id,
            folders=folders,
            passed_over=attempt.passed_over,
        )
    return Start(point=point, attempt=attempt, folders=folders)


def _open_for_keeper(context: RankContext, output: OutputFolder) -> None:
    keeper = context.keeper.client
    error = open_on_node(context, keeper, output) if keeper is not None else ""
    if error:
        context.log.warning("%s: saves are synchronous", error)
        context.keeper.disable()


def _recall(context: RankContext) -> ResumePoint | None:
    """The snapshot that an earlier start of this job's ranks has left in memory."""
    keeper = context.keeper.client
    recalled = keeper.recall() if keeper is not None and context.place.restart > 0 else None
    if recalled is None:
        return None
    manifest = Manifest.from_bytes(recalled.manifest.encode())
    return ResumePoint(path=Path(recalled.folder), manifest=manifest, is_durable=recalled.is_durable)


# ---- a folder on every node -------------------------------------------------------------------------------------


def _start_on_many_folders(
    context: RankContext, peers: Peers, output: OutputFolder, location: Location, folders: Folders
) -> Start:
    place = context.place
    context.log.debug("every node has an output folder of its own; this one is %s", output.root)
    opened: list[Store] = []

    def take() -> None:
        # The first rank has tried it before the model was loaded.
        is_tried = place.is_first or not folders.is_owner
        try:
            verify_access = context.settings.verify_access and not is_tried
            opened.append(open_tried(location, verify_access=verify_access))
        except ValueError as error:
            raise UsageError(f"{error}; training was not started") from error
        if folders.is_owner:
            context.reporter.warn_for_node()
            claim_folder(context, output)
            join_store(context, output, location)

    agree(peers, take)
    store = opened[0]
    claiming = OutputClaim(context, RemoteFolder(store)) if place.is_first else None
    agree(peers, claiming.begin if claiming else _nothing)
    assembling = Assembling(context, peers, output, folders, store)
    point = assembling.choose()
    found = agree(peers, lambda: names_to_upload(output, with_parts=True) if folders.is_owner else [])
    names = {name for names in found for name in names}

    def count() -> Attempt | None:
        if claiming is None:
            return None
        attempt = _count_attempt(output, claiming, RemoteFolder(store), point)
        claiming.complete(attempt.run_id, attempt.attempt, attempt.attempt_id, keep=names)
        return attempt

    counted = agree(peers, count)[0]
    assert counted is not None

    def open_folder() -> None:
        if folders.is_owner:
            output.open_attempt(counted.attempt_id)
            start_mover(
                context,
                output,
                location,
                attempt_id=counted.attempt_id,
                folders=folders,
                passed_over=counted.passed_over,
            )

    agree(peers, open_folder)
    return Start(point=point, attempt=counted, folders=folders, bring=assembling.bring)


def _nothing() -> None:
    """What ranks do that have nothing to do."""


# ---- both -------------------------------------------------------------------------------------------------------


def _count_attempt(
    output: OutputFolder, claiming: OutputClaim | None, remote: RemoteFolder | None, point: ResumePoint | None
) -> Attempt:
    run_id = point.manifest.run_id if point else uuid.uuid4().hex
    after = point.manifest.attempt if point else 0
    if claiming is not None:
        after = max(after, claiming.last_attempt_of(run_id))
    attempt = output.next_attempt(run_id, after=after)
    from_step = point.manifest.step if point else -1
    passed_over = tuple(step for step in remote.steps() if step > from_step) if remote is not None else ()
    return Attempt(
        run_id=run_id,
        attempt=attempt,
        attempt_id=f"{run_id[:8]}-{attempt}-{uuid.uuid4().hex[:8]}",
        passed_over=passed_over,
    )
