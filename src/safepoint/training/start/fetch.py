"""Bringing the newest checkpoint from the object store to the ranks' folder, all nodes together.

The first rank picks; one rank of each node fetches its share of the parts into the shared folder, so that the store
is read once for the whole job; the first rank gives the whole its name.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.format.catalog import checkpoint_name, set_aside
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.fetch import check_listing, fetch, prepare, publish, share, windows_of
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.errors import CheckpointError, ManifestError, NothingValidError, PeerError, SafepointError
from safepoint.foundation import clock
from safepoint.foundation.events.console import ProgressLine
from safepoint.foundation.events.run_events import CheckpointRejected
from safepoint.foundation.events.store_events import Fetched
from safepoint.foundation.files import delete_tree
from safepoint.foundation.units import ByteCounter
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.storage.store import Store
from safepoint.training.collective.collective_wait import work_apart
from safepoint.training.collective.peers import Peers
from safepoint.training.context.rank_context import RankContext
from safepoint.training.start.resume import ResumePoint


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOrder:
    """What all nodes are to fetch together.

    Args:
        manifest: of the checkpoint.
        working: the shared folder, with its files at their full size.
        ranks: who fetches, one rank for each node.
    """

    manifest: Manifest
    working: Path
    ranks: tuple[int, ...]


class Fetching:
    """Fetches for one start of the run.

    Args:
        context: this rank.
        peers: all ranks.
        output: the folder that all ranks see.
        location: the object store.
    """

    def __init__(self, context: RankContext, peers: Peers, output: OutputFolder, location: Location) -> None:
        self._context = context
        self._peers = peers
        self._output = output
        self._location = location
        self._store: Store | None = None
        one_of_node = peers.gather(context.place.local_rank == 0)
        self._ranks = tuple(rank for rank, fetches in enumerate(one_of_node) if fetches)

    @functools.cached_property
    def remote(self) -> RemoteFolder:
        """The checkpoints in the object store."""
        return RemoteFolder(self._opened())

    def newer_than(self, step: int | None) -> ResumePoint | None:
        """Fetch the newest valid checkpoint that is newer than `step`; on the first rank, while the others `serve`.

        Raises:
            NothingValidError: there are some, none of them valid, and `step` is None.
            StorageError: the store cannot be read, or the disk has too little room.
        """
        # Folders of others without a manifest are told of, so that nobody begins anew beside them unawares.
        everything = sorted(self.remote.steps() + self.remote.foreign_steps(), reverse=True)
        steps = [found for found in everything if step is None or found > step]
        for found in steps:
            where = str(self._location.child(checkpoint_name(found)))
            try:
                manifest = self.remote.manifest(found)
                check_listing(self._opened(), checkpoint_name(found), manifest)
                return self._fetch(manifest, where)
            except ManifestError as error:
                self._context.reporter.report(CheckpointRejected(path=where, file=MANIFEST_NAME, reason=str(error)))
            except CheckpointError as error:
                self._context.reporter.report(CheckpointRejected(path=where, file="its content", reason=str(error)))
        if steps and step is None:
            raise NothingValidError(
                f"{self._location} holds {len(steps)} checkpoint(s) and none of them is valid; "
                "training was not started",
                hint="see `safepoint checkpoints verify`; name another location to start afresh",
            )
        return None

    def _fetch(self, manifest: Manifest, where: str) -> ResumePoint:
        started_s = clock.monotonic_s()
        name = checkpoint_name(manifest.step)
        working = self._output.work / f"fetch-{name}"
        delete_tree(working)
        try:
            prepare(manifest.files, working)
            problem = self.serve(
                self._peers.from_first(FetchOrder(manifest=manifest, working=working, ranks=self._ranks))
            )
            if problem is not None:
                raise problem
            target = self._output.root / name
            if target.exists():  # found damaged
                set_aside(self._output.root, [target])
            publish(manifest, working, target, trash=self._output.trash)
        finally:
            delete_tree(working)
        self._context.reporter.report(
            Fetched(
                step=manifest.step,
                location=where,
                size_bytes=manifest.size_bytes,
                duration_s=round(clock.monotonic_s() - started_s, 3),
            )
        )
        return ResumePoint(path=target, manifest=manifest)

    def serve(self, order: FetchOrder) -> SafepointError | None:
        """Fetch this rank's share; what went wrong on any rank, damage first, is heard by all."""
        try:
            work_apart(self._peers, lambda: self._fetch_share(order))
        except PeerError:
            raise
        except SafepointError as error:
            return error
        return None

    def _fetch_share(self, order: FetchOrder) -> None:
        rank = self._context.place.rank
        if rank not in order.ranks:
            return
        parts = share(windows_of(order.manifest.files), index=order.ranks.index(rank), count=len(order.ranks))
        watch = ProgressLine("fetching").update if self._context.place.is_first else None
        counter = ByteCounter(watch, sum(part.size_bytes for part in parts))
        name = checkpoint_name(order.manifest.step)
        fetch(self._opened(), name, parts, order.working, progress=counter.add)

    def _opened(self) -> Store:
        if self._store is None:
            self._store = open_store(self._location)
        return self._store
