"""Moving the files of one checkpoint between nodes, and from the store to them; all calls are collective.

Who has what is agreed before: every rank computes the same plan from it. Owners then collect what comes without the
others, exchange the rest in one order that all know, and commit.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.digest import Digester
from safepoint.checkpoint.format.manifest import FileEntry, Manifest
from safepoint.checkpoint.format.verify import Verdict, verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.fetch import Window, fetch, prepare, publish, share, windows_of
from safepoint.errors import CheckpointError, SafepointError
from safepoint.foundation.events.console import ProgressLine
from safepoint.foundation.files import delete_tree, fsync_file, link_or_copy
from safepoint.foundation.units import ByteCounter
from safepoint.storage.store import Store
from safepoint.training.collective.collective_wait import work_apart
from safepoint.training.collective.peers import Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where every file comes from, the same on every rank.

    Args:
        good: owner → the files of which it holds a good copy.
        source: path → the owner that gives it to the others; None for the store.
        fetchers: what comes from the store → the owner that fetches it.
    """

    good: Mapping[int, frozenset[str]]
    source: Mapping[str, int | None]
    fetchers: Mapping[Window, int]

    def sources_of(self, entry: FileEntry) -> Iterator[tuple[Window, int]]:
        """The parts of a file, each with the owner that sends it."""
        source = self.source[entry.path]
        for window in windows_of([entry]):
            yield window, self.fetchers[window] if source is None else source

    def lacks(self, owner: int, entry: FileEntry) -> bool:
        """Whether `owner` has no good copy of its own."""
        return entry.path not in self.good[owner]


def make_plan(manifest: Manifest, good: Mapping[int, frozenset[str]], *, is_in_store: bool) -> Plan:
    """Decide where every file comes from: a node with a good copy before the store.

    Args:
        manifest: of the checkpoint.
        good: owner → the files of which it holds a good copy; an entry for every owner.
        is_in_store: whether the store has the checkpoint.

    Raises:
        CheckpointError: nobody has a good copy of a file.
    """
    source: dict[str, int | None] = {}
    for entry in manifest.files:
        source[entry.path] = min((owner for owner, paths in good.items() if entry.path in paths), default=None)
        if source[entry.path] is None and not is_in_store:
            raise CheckpointError(f"no node has a good copy of {entry.path}, and the store has none")
    windows = windows_of(entry for entry in manifest.files if source[entry.path] is None)
    owners = sorted(good)
    fetchers = {
        window: owner
        for index, owner in enumerate(owners)
        for window in share(windows, index=index, count=len(owners))
    }
    return Plan(good=good, source=source, fetchers=fetchers)


class Exchange:
    """Carries out plans for one start of the run.

    Args:
        peers: all ranks.
        output: this node's folder.
        owners: the ranks that own one, ascending.
        store: the object store.
    """

    def __init__(self, peers: Peers, output: OutputFolder, owners: Sequence[int], store: Store) -> None:
        self._rank = peers.place.rank
        self._peers = peers
        self._output = output
        self._owners = tuple(owners)
        self._store = store
        self._sender = peers.sender_among(owners)

    def carry_out(self, manifest: Manifest, plan: Plan, folder: Path, *, before_commit: Callable[[], None]) -> None:
        """Put the checkpoint together on every node, under its name.

        Args:
            manifest: of the checkpoint.
            plan: where its files come from.
            folder: where this node's good copies are.
            before_commit: called on every rank, when all that can fail has been done.

        Raises:
            CheckpointError: a file turned out to be damaged; the same on every rank.
            StorageError: the store cannot be read, or a disk not written; likewise.
        """
        working = self._output.work / f"assemble-{checkpoint_name(manifest.step)}"

        def collect() -> None:
            self._collect(manifest, plan, folder, working)

        def exchange() -> None:
            self._exchange(manifest, plan, working)

        def commit() -> None:
            self._commit(manifest, plan, working)

        try:
            for stage in (collect, exchange):
                work_apart(self._peers, stage if self._rank in self._owners else _nothing)
            before_commit()
            work_apart(self._peers, commit if self._rank in self._owners else _nothing)
        finally:
            if self._rank in self._owners:
                delete_tree(working)

    def _collect(self, manifest: Manifest, plan: Plan, folder: Path, working: Path) -> None:
        """Put into the working folder what this node has, and fetch its share of what no node has."""
        delete_tree(working)
        prepare([entry for entry in manifest.files if plan.lacks(self._rank, entry)], working)
        for path in sorted(plan.good[self._rank]):
            (working / path).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(folder / path, working / path)
        mine = [window for window, owner in plan.fetchers.items() if owner == self._rank]
        counter = ByteCounter(self._watch("fetching"), sum(window.size_bytes for window in mine))
        if mine:
            fetch(self._store, checkpoint_name(manifest.step), mine, working, progress=counter.add)

    def _exchange(self, manifest: Manifest, plan: Plan, working: Path) -> None:
        """Send and receive what other nodes lack; every owner takes part in every transfer, whatever happens."""
        transfers = [
            (window, source, plan.lacks(self._rank, entry) and source != self._rank)
            for entry in manifest.files
            for window, source in plan.sources_of(entry)
            if any(plan.lacks(owner, entry) for owner in self._owners if owner != source)
        ]
        counter = ByteCounter(self._watch("exchanging"), sum(window.size_bytes for window, _, _ in transfers))
        largest_bytes = max((window.size_bytes for window, _, _ in transfers), default=0)
        buffer = torch.empty(largest_bytes, dtype=torch.uint8)
        problem: SafepointError | OSError | None = None
        for window, source, is_wanted in transfers:
            block = buffer[: window.size_bytes]
            if source == self._rank:
                try:
                    _read_into(working / window.path, window.start, block)
                except OSError as error:
                    problem = problem or error
            if window.size_bytes:
                self._sender.send(block, source)
            if is_wanted and problem is None:
                try:
                    _write_from(block, working / window.path, window)
                except (SafepointError, OSError) as error:
                    problem = error
            counter.add(window.size_bytes)
        if problem is not None:
            raise problem

    def _commit(self, manifest: Manifest, plan: Plan, working: Path) -> None:
        target = self._output.root / checkpoint_name(manifest.step)
        is_there = not any(plan.lacks(self._rank, entry) for entry in manifest.files)
        if is_there and verify(target, deep=False) == Verdict(manifest=manifest, faults=()):
            return
        for entry in manifest.files:
            fsync_file(working / entry.path)
        publish(manifest, working, target, trash=self._output.trash)

    def _watch(self, what: str) -> Callable[[int, int], None] | None:
        return ProgressLine(what).update if self._peers.place.is_first else None


def _nothing() -> None:
    """What ranks do that own no folder."""


def _read_into(path: Path, start: int, block: torch.Tensor) -> None:
    view = block.numpy().data
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while view:
            count = file.readinto(view)
            if not count:
                raise OSError(f"{path} ends too early")
            view = view[count:]


def _write_from(block: torch.Tensor, path: Path, window: Window) -> None:
    view = block.numpy().data
    digester = Digester()
    digester.update(view)
    if digester.digest != window.digest:
        raise CheckpointError(f"{window.path} arrived damaged from another node")
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        position = window.start
        while view:
            count = os.pwrite(descriptor, view, position)
            view, position = view[count:], position + count
    finally:
        os.close(descriptor)
