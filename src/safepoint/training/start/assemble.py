"""A checkpoint for every node, from parts on the disks of all nodes and from the object store (docs/adr/0008).

Each node has a folder of its own. What a good copy of exists on any node comes from there, through the ranks' own
network; what none has comes from the store, each node fetching another share of it. So the store is read once for the
whole job at most, and in the end every node holds the whole checkpoint, verified.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.format.catalog import checkpoint_name, list_checkpoints, set_aside, step_of
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest
from safepoint.checkpoint.format.node_part import read_manifest_of_any, read_part, verify_part
from safepoint.checkpoint.format.verify import compare_content, verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.fetch import check_listing
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.errors import CheckpointError, ManifestError, NothingValidError, SafepointError
from safepoint.foundation import clock
from safepoint.foundation.events.console import ProgressLine
from safepoint.foundation.events.run_events import CheckpointRejected, Resumed, SetAside
from safepoint.foundation.events.store_events import Fetched
from safepoint.foundation.units import plural
from safepoint.storage.store import Store
from safepoint.training.collective.collective_wait import agree, work_apart
from safepoint.training.collective.peers import Peers
from safepoint.training.context.rank_context import RankContext
from safepoint.training.start.exchange import Exchange, Plan, make_plan
from safepoint.training.start.folders import Folders
from safepoint.training.start.resume import ResumePoint, named_point


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    """What one node has of a checkpoint, by names and sizes: a manifest, and those of its files that are there."""

    manifest: Manifest
    files: frozenset[FileEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What one node's folder shows: every step that a name states, and what can be used of them."""

    steps: tuple[int, ...] = ()
    holdings: tuple[_Holding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A checkpoint that may be resumed from.

    `is_in_store` says whether the store has it too; `named` is the folder on the first rank that the user named, and
    `is_elsewhere` whether that is not in the output folder.
    """

    manifest: Manifest
    is_in_store: bool = False
    named: Path | None = None
    is_elsewhere: bool = False

    @property
    def name(self) -> str:
        return checkpoint_name(self.manifest.step)


class Assembling:
    """Assembles checkpoints for one start of the run; all calls are collective.

    Args:
        context: this rank.
        peers: all ranks.
        output: this node's folder.
        folders: who owns one.
        store: the object store.
    """

    def __init__(
        self, context: RankContext, peers: Peers, output: OutputFolder, folders: Folders, store: Store
    ) -> None:
        self._context = context
        self._peers = peers
        self._output = output
        self._folders = folders
        self._store = store
        self._remote = RemoteFolder(store)
        self._exchange = Exchange(peers, output, folders.owners, store)

    # ---- choosing -------------------------------------------------------------------------------------------

    def choose(self) -> ResumePoint | None:
        """Pick the newest checkpoint that can be put together, and put it together on every node.

        Returns:
            Where it is on this node; None to begin at step 0.

        Raises:
            NothingValidError: there are checkpoints, and none can be put together.
            CheckpointError: the one that was named is not valid.
            StorageError: the store cannot be read, or a disk has too little room.
        """
        settings, is_first_start = self._context.settings, self._context.place.restart == 0
        if settings.resume == "never" or (settings.from_scratch and is_first_start):
            self._set_aside_after(-1)
            return None
        started_s = clock.monotonic_s()
        is_named = settings.resume not in {"auto", "never"} and is_first_start
        manifest = None if is_named else self._choose_newest()
        if manifest is None and settings.resume == "auto":
            return None
        if manifest is None:  # it was named, or nothing was saved since the first start, at which it was
            manifest = self._choose_named()
        self._set_aside_after(manifest.step)
        path = self._output.root / checkpoint_name(manifest.step)
        duration_s = round(clock.monotonic_s() - started_s, 3)
        self._context.reporter.report(
            Resumed(
                step=manifest.step,
                path=str(path),
                num_files=len(manifest.files),
                size_bytes=manifest.size_bytes,
                duration_s=duration_s,
            )
        )
        return ResumePoint(path=path, manifest=manifest)

    def bring(self, step: int) -> None:
        """Put the checkpoint of `step` together on every node, for a framework that is going to read it.

        Raises:
            CheckpointError: it cannot be put together any more.
            StorageError: the store cannot be read, or a disk has too little room.
        """
        views = self._look()
        candidate: _Candidate | SafepointError | None = None
        if self._context.place.is_first:
            try:
                held = self._held(step, views)
                if held:
                    candidate = _Candidate(manifest=max(held, key=lambda manifest: manifest.attempt))
                else:
                    candidate = next(self._candidates_of(step, views, self._remote.steps()), None)
            except SafepointError as error:
                candidate = error
        candidate = self._peers.from_first(candidate)
        if candidate is None:
            raise CheckpointError(f"{checkpoint_name(step)} is not complete on the nodes and not in the store")
        if isinstance(candidate, SafepointError):
            raise candidate
        self._assemble(candidate)

    def _choose_named(self) -> Manifest:
        candidate: _Candidate | SafepointError | None = None
        if self._context.place.is_first:
            try:
                point = named_point(Path(self._context.settings.resume), ProgressLine("verifying").update)
                is_elsewhere = point.path.parent.resolve() != self._output.root.resolve()
                candidate = _Candidate(manifest=point.manifest, named=point.path, is_elsewhere=is_elsewhere)
            except SafepointError as error:
                candidate = error
        candidate = self._peers.from_first(candidate)
        if isinstance(candidate, SafepointError):
            raise candidate
        assert candidate is not None
        if candidate.is_elsewhere:  # what is here is another run's
            self._set_aside_after(-1)
        self._assemble(candidate)
        return candidate.manifest

    def _choose_newest(self) -> Manifest | None:
        views = self._look()
        candidates = self._candidates(views) if self._context.place.is_first else None
        while True:
            candidate: _Candidate | SafepointError | None = None
            if candidates is not None:
                try:
                    candidate = next(candidates, None)
                except SafepointError as error:
                    candidate = error
            candidate = self._peers.from_first(candidate)
            if candidate is None:
                return None
            if isinstance(candidate, SafepointError):
                raise candidate
            try:
                self._assemble(candidate)
            except CheckpointError as error:
                self._reject(candidate.name, str(error))
            else:
                return candidate.manifest

    def _candidates(self, views: Sequence[_View]) -> Iterator[_Candidate]:
        """Newest first; ends with an error when there was something, and nothing of it was any good."""
        in_store = self._remote.steps()
        foreign = self._remote.foreign_steps()  # told of, so that nobody begins anew beside them unawares
        steps = sorted({*in_store, *foreign, *(step for view in views for step in view.steps)}, reverse=True)
        for step in steps:
            yield from self._candidates_of(step, views, in_store)
        if steps:
            raise NothingValidError(
                f"{self._store.location} and the nodes hold {plural(len(steps), 'checkpoint')}, and none of them is "
                "valid and complete; training was not started",
                hint="see `safepoint checkpoints verify`; name another location to start afresh",
            )

    def _candidates_of(self, step: int, views: Sequence[_View], in_store: Sequence[int]) -> Iterator[_Candidate]:
        stored: Manifest | None = None
        try:
            stored = self._remote.manifest(step) if step in in_store else None
            if stored is not None:
                check_listing(self._store, checkpoint_name(step), stored)
        except CheckpointError as error:
            stored = None
            self._reject(checkpoint_name(step), str(error))
        found = [_Candidate(manifest=manifest) for manifest in self._held(step, views) if manifest != stored]
        if stored is not None:
            found.append(_Candidate(manifest=stored, is_in_store=True))
        if not found:
            is_known = any(holding.manifest.step == step for view in views for holding in view.holdings)
            reason = "parts of other nodes are missing" if is_known else "there is no manifest that can be read"
            self._reject(checkpoint_name(step), reason)
        # Of the store's own run the newest attempt, of one attempt what names most files; another run's last.
        run_id = stored.run_id if stored is not None else None
        found.sort(key=lambda candidate: _rank(candidate.manifest, run_id), reverse=True)
        yield from found

    def _held(self, step: int, views: Sequence[_View]) -> list[Manifest]:
        """The manifests of this step of which all files are on the nodes."""
        holdings = [holding for view in views for holding in view.holdings if holding.manifest.step == step]
        held = {entry for holding in holdings for entry in holding.files}
        manifests = {holding.manifest.to_bytes(): holding.manifest for holding in holdings}
        return [manifest for manifest in manifests.values() if held >= set(manifest.files)]

    def _reject(self, name: str, reason: str) -> None:
        where = str(self._store.location.child(name))
        self._context.reporter.report(CheckpointRejected(path=where, file="the whole", reason=reason))

    def _set_aside_after(self, step: int) -> None:
        """Move what is newer than the chosen checkpoint out of the way, on every node."""
        self._set_aside(lambda path: (step_of(path) or 0) > step)

    def _set_aside(self, is_in_the_way: Callable[[Path], bool]) -> None:
        def move() -> tuple[int, Path | None]:
            if not self._folders.is_owner:
                return 0, None
            paths = [path for path in list_checkpoints(self._output.root) if is_in_the_way(path)]
            return len(paths), set_aside(self._output.root, paths)

        moved = [(count, place) for count, place in agree(self._peers, move) if place is not None]
        if moved:
            count, place = max(moved, key=lambda pair: pair[0])
            self._context.reporter.report(SetAside(num_checkpoints=count, path=str(place)))

    # ---- what there is --------------------------------------------------------------------------------------

    def _look(self) -> list[_View]:
        """What all nodes have, by rank."""
        return agree(self._peers, self._view)

    def _view(self) -> _View:
        if not self._folders.is_owner:
            return _View()
        steps = [step for path in list_checkpoints(self._output.root) if (step := step_of(path)) is not None]
        return _View(steps=tuple(steps), holdings=tuple(self._holdings()))

    def _holdings(self) -> Iterator[_Holding]:
        for path, manifest in self._output.manifests():
            if step_of(path) != manifest.step:
                continue
            try:
                if (path / MANIFEST_NAME).exists():
                    entries, faults = manifest.files, verify(path, deep=False).faults
                else:
                    part = read_part(path)
                    entries, faults = part.files, verify_part(path, part, deep=False)
            except ManifestError:
                continue
            bad = {fault.file for fault in faults}
            yield _Holding(manifest=manifest, files=frozenset(entry for entry in entries if entry.path not in bad))

    def _good_files(self, candidate: _Candidate) -> frozenset[str]:
        """The files of which this node has a good copy, under whichever manifest; all of its copies are read."""
        if not self._folders.is_owner:
            return frozenset()
        if candidate.named is not None and self._context.place.is_first:  # verified a moment ago
            return frozenset(entry.path for entry in candidate.manifest.files)
        for holding in self._holdings():
            if holding.manifest.step == candidate.manifest.step:
                entries = [entry for entry in candidate.manifest.files if entry in holding.files]
                watch = ProgressLine("verifying").update if self._context.place.is_first else None
                faults = compare_content(self._output.root / candidate.name, entries, watch)
                return frozenset(entry.path for entry in entries) - {fault.file for fault in faults}
        return frozenset()

    # ---- putting together -----------------------------------------------------------------------------------

    def _assemble(self, candidate: _Candidate) -> None:
        """Raises CheckpointError or StorageError, the same on every rank, when it cannot be done."""
        started_s = clock.monotonic_s()
        try:
            plan = self._put_together(candidate)
        except CheckpointError:  # a copy that was good a moment ago could not be read again: the next look finds that
            plan = self._put_together(candidate)
        fetched_bytes = sum(window.size_bytes for window in plan.fetchers)
        if fetched_bytes:
            self._context.reporter.report(
                Fetched(
                    step=candidate.manifest.step,
                    location=str(self._store.location.child(candidate.name)),
                    size_bytes=fetched_bytes,
                    duration_s=round(clock.monotonic_s() - started_s, 3),
                )
            )

    def _put_together(self, candidate: _Candidate) -> Plan:
        good = work_apart(self._peers, lambda: self._good_files(candidate))
        good_of = {owner: good[owner] for owner in self._folders.owners}
        plan = make_plan(candidate.manifest, good_of, is_in_store=candidate.is_in_store)
        folder = self._output.root / candidate.name
        if candidate.named is not None and self._context.place.is_first:
            folder = candidate.named
        self._exchange.carry_out(candidate.manifest, plan, folder, before_commit=lambda: self._clear(candidate))
        return plan

    def _clear(self, candidate: _Candidate) -> None:
        """What has the checkpoint's name and is another run's, or nobody's, is not replaced but moved aside."""

        def is_in_the_way(path: Path) -> bool:
            if path.name != candidate.name:
                return False
            try:
                return read_manifest_of_any(path).run_id != candidate.manifest.run_id
            except ManifestError:
                return True

        self._set_aside(is_in_the_way)


def _rank(manifest: Manifest, run_id: str | None) -> tuple[bool, int, int]:
    return run_id in {None, manifest.run_id}, manifest.attempt, len(manifest.files)
