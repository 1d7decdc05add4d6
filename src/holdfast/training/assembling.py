"""A checkpoint for every node, from parts on the disks of all nodes and from the object store (docs/adr/0008).

Each node has a folder of its own. What a good copy of exists on any node comes from there, through the ranks' own
network; what none has comes from the store, each node fetching another share of it. So the store is read once for the
whole job at most, and in the end every node holds the whole checkpoint, verified.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.checkpoint.catalog import checkpoint_name, list_checkpoints, set_aside, step_of
from holdfast.checkpoint.commit import OutputFolder
from holdfast.checkpoint.digest import Digester
from holdfast.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from holdfast.checkpoint.part import read_part, verify_part
from holdfast.checkpoint.remote import RemoteFolder
from holdfast.checkpoint.transfer import Part, check_listing, fetch, parts_of, prepare, publish, share
from holdfast.checkpoint.verify import compare_content, verify
from holdfast.errors import CheckpointError, HoldfastError, ManifestError, NothingValidError
from holdfast.foundation import clock
from holdfast.foundation.console import ProgressLine
from holdfast.foundation.events import CheckpointRejected, Fetched, Resumed, SetAside
from holdfast.foundation.files import delete_tree, fsync_file, link_or_copy
from holdfast.foundation.units import ByteCounter, plural
from holdfast.storage.store import Store
from holdfast.training.folders import Folders
from holdfast.training.meeting import work_apart
from holdfast.training.peers import Peers
from holdfast.training.resume import ResumePoint, named_point
from holdfast.training.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    """What one node has of a checkpoint, by names and sizes."""

    manifest: Manifest
    paths: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A checkpoint that may be resumed from.

    `is_in_store` says whether the store has it too; `named` is the folder on the first rank that the user named.
    """

    manifest: Manifest
    is_in_store: bool = False
    named: Path | None = None

    @property
    def name(self) -> str:
        return checkpoint_name(self.manifest.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Where every file comes from, the same on every rank.

    Args:
        good: owner → the files of which it holds a good copy.
        source: path → the owner that gives it to the others; None for the store.
        fetchers: what comes from the store → the owner that fetches it.
    """

    good: Mapping[int, frozenset[str]]
    source: Mapping[str, int | None]
    fetchers: Mapping[Part, int]

    def sources_of(self, entry: FileEntry) -> Iterator[tuple[Part, int]]:
        """The parts of a file, each with the owner that sends it."""
        source = self.source[entry.path]
        for part in parts_of([entry]):
            yield part, self.fetchers[part] if source is None else source

    def lacks(self, owner: int, entry: FileEntry) -> bool:
        """Whether `owner` has no good copy of its own."""
        return entry.path not in self.good[owner]


class Assembling:
    """Assembles checkpoints for one start of the run; all calls are collective.

    Args:
        session: this rank.
        peers: all ranks.
        output: this node's folder.
        folders: who owns one.
        store: the object store.
    """

    def __init__(self, session: Session, peers: Peers, output: OutputFolder, folders: Folders, store: Store) -> None:
        self._session = session
        self._peers = peers
        self._output = output
        self._folders = folders
        self._store = store
        self._remote = RemoteFolder(store)
        self._sender = peers.sender_among(folders.owners)

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
        settings, is_first_start = self._session.settings, self._session.place.restart == 0
        if settings.resume == "never" or (settings.from_scratch and is_first_start):
            self._set_aside_after(-1)
            return None
        started_s = clock.monotonic_s()
        is_named = settings.resume not in {"auto", "never"} and is_first_start
        manifest = self._choose_named() if is_named else self._choose_newest()
        if manifest is None:
            return None
        self._set_aside_after(manifest.step)
        path = self._output.root / checkpoint_name(manifest.step)
        duration_s = round(clock.monotonic_s() - started_s, 3)
        self._session.report(
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
        holdings = self._all_holdings()
        candidate: _Candidate | HoldfastError | None = None
        if self._session.place.is_first:
            try:
                candidate = next(self._candidates_of(step, holdings, self._remote.steps()), None)
            except HoldfastError as error:
                candidate = error
        candidate = self._peers.from_first(candidate)
        if candidate is None:
            raise CheckpointError(f"{checkpoint_name(step)} is not complete on the nodes and not in the store")
        if isinstance(candidate, HoldfastError):
            raise candidate
        self._assemble(candidate)

    def _choose_named(self) -> Manifest:
        candidate: _Candidate | HoldfastError | None = None
        if self._session.place.is_first:
            try:
                point = named_point(Path(self._session.settings.resume), ProgressLine("verifying").update)
                candidate = _Candidate(manifest=point.manifest, named=point.path)
            except HoldfastError as error:
                candidate = error
        candidate = self._peers.from_first(candidate)
        if isinstance(candidate, HoldfastError):
            raise candidate
        assert candidate is not None
        self._assemble(candidate)
        return candidate.manifest

    def _choose_newest(self) -> Manifest | None:
        holdings = self._all_holdings()
        candidates = self._candidates(holdings) if self._session.place.is_first else None
        while True:
            candidate: _Candidate | HoldfastError | None = None
            if candidates is not None:
                try:
                    candidate = next(candidates, None)
                except HoldfastError as error:
                    candidate = error
            candidate = self._peers.from_first(candidate)
            if candidate is None:
                return None
            if isinstance(candidate, HoldfastError):
                raise candidate
            try:
                self._assemble(candidate)
            except CheckpointError as error:
                self._reject(candidate.name, str(error))
            else:
                return candidate.manifest

    def _candidates(self, holdings: Sequence[_Holding]) -> Iterator[_Candidate]:
        """Newest first; ends with an error when there was something, and nothing of it was any good."""
        in_store = self._remote.steps()
        foreign = self._remote.foreign_steps()  # told of, so that nobody begins anew beside them unawares
        here = {step for path in list_checkpoints(self._output.root) if (step := step_of(path)) is not None}
        steps = sorted({*here, *in_store, *foreign, *(held.manifest.step for held in holdings)}, reverse=True)
        for step in steps:
            yield from self._candidates_of(step, holdings, in_store)
        if steps:
            raise NothingValidError(
                f"{self._store.location} and the nodes hold {plural(len(steps), 'checkpoint')}, and none of them is "
                "valid and complete; training was not started",
                hint="see `holdfast checkpoints verify`; name another location to start afresh",
            )

    def _candidates_of(
        self, step: int, holdings: Sequence[_Holding], in_store: Sequence[int]
    ) -> Iterator[_Candidate]:
        stored: Manifest | None = None
        try:
            stored = self._remote.manifest(step) if step in in_store else None
            if stored is not None:
                check_listing(self._store, checkpoint_name(step), stored)
        except CheckpointError as error:
            stored = None
            self._reject(checkpoint_name(step), str(error))
        manifests = {held.manifest.to_bytes(): held.manifest for held in holdings if held.manifest.step == step}
        for manifest in sorted(manifests.values(), key=lambda manifest: manifest.attempt, reverse=True):
            if manifest == stored:
                continue
            held = {path for holding in holdings if holding.manifest == manifest for path in holding.paths}
            if held >= {entry.path for entry in manifest.files}:
                yield _Candidate(manifest=manifest)
            elif stored is None:
                self._reject(checkpoint_name(step), "parts of other nodes are missing")
        if stored is not None:
            yield _Candidate(manifest=stored, is_in_store=True)
        elif not manifests:
            self._reject(checkpoint_name(step), "there is no manifest that can be read")

    def _reject(self, name: str, reason: str) -> None:
        where = str(self._store.location.child(name))
        self._session.report(CheckpointRejected(path=where, file="the whole", reason=reason))

    def _set_aside_after(self, step: int) -> None:
        """Move what is newer than the chosen checkpoint out of the way, on every node."""
        num_moved, place = 0, None
        if self._folders.is_owner:
            newer = [path for path in list_checkpoints(self._output.root) if (step_of(path) or 0) > step]
            num_moved, place = len(newer), set_aside(self._output.root, newer)
        moved = [(count, path) for count, path in self._peers.gather((num_moved, place)) if path is not None]
        if moved:
            self._session.report(SetAside(num_checkpoints=max(count for count, _ in moved), path=str(moved[0][1])))

    # ---- what there is --------------------------------------------------------------------------------------

    def _all_holdings(self) -> list[_Holding]:
        mine = self._holdings() if self._folders.is_owner else []
        return [holding for holdings in self._peers.gather(mine) for holding in holdings]

    def _holdings(self) -> list[_Holding]:
        found: list[_Holding] = []
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
            found.append(
                _Holding(manifest=manifest, paths=frozenset(entry.path for entry in entries if entry.path not in bad))
            )
        return found

    def _good_files(self, candidate: _Candidate) -> frozenset[str]:
        """The files of which this node has a good copy; all of its copies are read."""
        if not self._folders.is_owner:
            return frozenset()
        if candidate.named is not None and self._session.place.is_first:  # verified a moment ago
            return frozenset(entry.path for entry in candidate.manifest.files)
        for holding in self._holdings():
            if holding.manifest == candidate.manifest:
                entries = [entry for entry in holding.manifest.files if entry.path in holding.paths]
                line = ProgressLine("verifying")
                faults = compare_content(self._output.root / candidate.name, entries, line.update)
                return holding.paths - {fault.file for fault in faults}
        return frozenset()

    # ---- putting together -----------------------------------------------------------------------------------

    def _assemble(self, candidate: _Candidate) -> None:
        """Raises CheckpointError or StorageError, the same on every rank, when it cannot be done."""
        started_s = clock.monotonic_s()
        good, problems = work_apart(self._peers, lambda: self._good_files(candidate))
        if problems:
            raise problems[0]
        plan = self._plan(candidate, {owner: good[owner] or frozenset() for owner in self._folders.owners})
        working = self._output.work / f"assemble-{candidate.name}"
        try:
            for stage in (self._collect, self._exchange, self._publish):
                _, problems = work_apart(self._peers, lambda stage=stage: stage(candidate, plan, working))
                if problems:
                    raise problems[0]
        finally:
            if self._folders.is_owner:
                delete_tree(working)
        fetched_bytes = sum(part.size_bytes for part in plan.fetchers)
        if fetched_bytes:
            self._session.report(
                Fetched(
                    step=candidate.manifest.step,
                    location=str(self._store.location.child(candidate.name)),
                    size_bytes=fetched_bytes,
                    duration_s=round(clock.monotonic_s() - started_s, 3),
                )
            )

    def _plan(self, candidate: _Candidate, good: Mapping[int, frozenset[str]]) -> _Plan:
        source: dict[str, int | None] = {}
        for entry in candidate.manifest.files:
            source[entry.path] = min((owner for owner, paths in good.items() if entry.path in paths), default=None)
            if source[entry.path] is None and not candidate.is_in_store:
                raise CheckpointError(f"no node has a good copy of {entry.path}, and the store has none")
        parts = parts_of(entry for entry in candidate.manifest.files if source[entry.path] is None)
        owners = self._folders.owners
        fetchers = {
            part: owner for index, owner in enumerate(owners) for part in share(parts, index=index, count=len(owners))
        }
        return _Plan(good=good, source=source, fetchers=fetchers)

    def _has_whole(self, candidate: _Candidate, plan: _Plan) -> bool:
        rank = self._session.place.rank
        folder = self._output.root / candidate.name
        return (folder / MANIFEST_NAME).exists() and not any(
            plan.lacks(rank, entry) for entry in candidate.manifest.files
        )

    def _collect(self, candidate: _Candidate, plan: _Plan, working: Path) -> None:
        """Put into the working folder what this node has, and fetch its share of what no node has."""
        if not self._folders.is_owner:
            return
        rank = self._session.place.rank
        delete_tree(working)
        prepare([entry for entry in candidate.manifest.files if plan.lacks(rank, entry)], working)
        folder = self._folder_of(candidate)
        for path in sorted(plan.good[rank]):
            (working / path).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(folder / path, working / path)
        mine = [part for part, owner in plan.fetchers.items() if owner == rank]
        counter = ByteCounter(self._watch("fetching"), sum(part.size_bytes for part in mine))
        if mine:
            fetch(self._store, candidate.name, mine, working, progress=counter.add)

    def _exchange(self, candidate: _Candidate, plan: _Plan, working: Path) -> None:
        """Send and receive what other nodes lack; every owner takes part in every transfer, whatever happens."""
        if not self._folders.is_owner:
            return
        rank = self._session.place.rank
        transfers = [
            (part, source, plan.lacks(rank, entry) and source != rank)
            for entry in candidate.manifest.files
            for part, source in plan.sources_of(entry)
            if any(plan.lacks(owner, entry) for owner in self._folders.owners if owner != source)
        ]
        counter = ByteCounter(self._watch("exchanging"), sum(part.size_bytes for part, _, _ in transfers))
        largest_bytes = max((part.size_bytes for part, _, _ in transfers), default=0)
        buffer = torch.empty(largest_bytes, dtype=torch.uint8)
        problem: HoldfastError | OSError | None = None
        for part, source, is_wanted in transfers:
            block = buffer[: part.size_bytes]
            if source == rank:
                try:
                    _read_into(working / part.path, part.start, block)
                except OSError as error:
                    problem = problem or error
            if part.size_bytes:
                self._sender.send(block, source)
            if is_wanted and problem is None:
                try:
                    _write_from(block, working / part.path, part)
                except (HoldfastError, OSError) as error:
                    problem = error
            counter.add(part.size_bytes)
        if problem is not None:
            raise problem

    def _publish(self, candidate: _Candidate, plan: _Plan, working: Path) -> None:
        if self._folders.is_owner and not self._has_whole(candidate, plan):
            for entry in candidate.manifest.files:
                fsync_file(working / entry.path)
            target = self._output.root / candidate.name
            publish(candidate.manifest, working, target, trash=self._output.trash)

    def _folder_of(self, candidate: _Candidate) -> Path:
        if candidate.named is not None and self._session.place.is_first:
            return candidate.named
        return self._output.root / candidate.name

    def _watch(self, what: str) -> Callable[[int, int], None] | None:
        return ProgressLine(what).update if self._session.place.is_first else None


def _read_into(path: Path, start: int, block: torch.Tensor) -> None:
    view = block.numpy().data
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while view:
            count = file.readinto(view)
            if not count:
                raise OSError(f"{path} ends too early")
            view = view[count:]


def _write_from(block: torch.Tensor, path: Path, part: Part) -> None:
    view = block.numpy().data
    digester = Digester()
    digester.update(view)
    if digester.digest != part.digest:
        raise CheckpointError(f"{part.path} arrived damaged from another node")
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        position = part.start
        while view:
            count = os.pwrite(descriptor, view, position)
            view, position = view[count:], position + count
    finally:
        os.close(descriptor)


__all__ = ["Assembling"]
