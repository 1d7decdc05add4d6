"""Copies one checkpoint into the output folder of every node, or into the one folder that all nodes share.

The files come from the nodes that have the checkpoint, and from the object store.

All ranks compute the same plan from the contents of all folders. A file that a folder lacks comes from the first
folder with a good copy. A file that every folder lacks comes from the store. One rank of each node fetches a share of
these files, so each file is read only once from the store. Then the owners of the folders, one rank for each folder,
send each other the files that folders lack. All owners make the same transfers in the same order. If there is only
one folder, there are no transfers. All calls are collective.
"""

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from safepoint.checkpoint.commit import FolderDestination, commit, link_or_copy
from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import FileEntry, Manifest
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.thinning import is_full
from safepoint.checkpoint.remote.fetch import (
    MAKE_ROOM,
    Window,
    create_files,
    fetch,
    refusing_impossible_path,
    share,
    windows_of,
)
from safepoint.errors import CheckpointError, NoRoomError, SafepointError
from safepoint.foundation.events.console import ProgressLine
from safepoint.foundation.files import delete_tree, write_at
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.opening import open_regular
from safepoint.foundation.units import ByteCounter
from safepoint.storage.store import Store
from safepoint.training.collective.collective_wait import long_on_all_ranks, on_first_rank
from safepoint.training.collective.peers import Peers
from safepoint.training.start.copies import VerifiedCopy
from safepoint.training.start.folders import Folders


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Where every file comes from, the same on every rank.

    Args:
        manifest: the checkpoint's manifest.
        copies: owner → the copy of the checkpoint in its folder.
        source: path of a file → the owner that sends the file to other owners; None if it comes from the store.
        fetchers: window (a piece of a file that comes from the store) → the rank that fetches it.
    """

    manifest: Manifest
    copies: Mapping[int, VerifiedCopy]
    source: Mapping[str, int | None]
    fetchers: Mapping[Window, int]

    def lacks(self, owner: int, entry: FileEntry) -> bool:
        """Whether the folder of `owner` has no good copy of a file."""
        return entry.path not in self.copies[owner].good


def make_plan(
    manifest: Manifest, copies: Mapping[int, VerifiedCopy], *, folders: Folders, is_in_store: bool
) -> TransferPlan | None:
    """Decide where every file comes from.

    Args:
        manifest: the checkpoint's manifest.
        copies: owner → the copy of the checkpoint in its folder, for every owner.
        folders: which ranks fetch, and into which folder.
        is_in_store: whether the store has the checkpoint.

    Returns:
        The plan; None if no folder has a good copy of some file, and the store does not have the checkpoint.
    """
    source = {
        entry.path: min((owner for owner, copy in copies.items() if entry.path in copy.good), default=None)
        for entry in manifest.files
    }
    missing = [entry for entry in manifest.files if source[entry.path] is None]
    if missing and not is_in_store:
        return None
    windows, ranks = windows_of(missing), sorted(folders.owner_of)
    return TransferPlan(
        manifest=manifest,
        copies=copies,
        source=source,
        fetchers={
            window: rank
            for index, rank in enumerate(ranks)
            for window in share(windows, index=index, count=len(ranks))
        },
    )


class Transfer:
    """Carries out plans for one start of the run.

    Args:
        peers: all ranks.
        output: this rank's folder.
        folders: which ranks use which folder.
        store: the object store, or None.
    """

    def __init__(self, peers: Peers, output: OutputFolder, folders: Folders, store: Store | None) -> None:
        self._rank = peers.place.rank
        self._peers = peers
        self._output = output
        self._folders = folders
        self._store = store
        self._sender = None if folders.is_shared else peers.sender_among(folders.owners)

    def carry_out(self, plan: TransferPlan, *, before_commit: Callable[[], None], target: Path | None = None) -> None:
        """Complete the checkpoint in every folder, under the checkpoint's name.

        Args:
            plan: where the checkpoint's files come from.
            target: the folder that becomes the checkpoint, on every node; None for the folder with the checkpoint's
                name in the output folder.
            before_commit: called on every rank when every folder has all files, just before the files are committed.
                Not called if every folder had the complete checkpoint from the beginning.

        Raises:
            CheckpointError: a file is damaged; the same error on every rank.
            NoRoomError: a disk has too little room for the checkpoint; the same error on every rank.
            StorageError: the store cannot be read, or a disk cannot be written; the same error on every rank.
        """
        if all(copy.is_complete for copy in plan.copies.values()):
            return
        # The folder has a new name in each start, because it may be impossible to delete the folder of an earlier
        # start. The name is the same on all ranks.
        unique = on_first_rank(self._peers, lambda: uuid.uuid4().hex)
        working = self._output.work / f"resume-{checkpoint_name(plan.manifest.step)}-{unique}"
        completes = self._folders.is_owner and not plan.copies[self._rank].is_complete
        try:
            self._do(completes, lambda: self._prepare(plan, working))
            self._do(self._rank in self._folders.owner_of, lambda: self._fetch(plan, working))
            self._do(self._folders.is_owner, lambda: self._exchange(plan, working))
            before_commit()
            self._do(completes, lambda: self._commit(plan.manifest, working, target))
        finally:
            if completes:
                delete_tree(working)

    def _do(self, is_here: bool, stage: Callable[[], None]) -> None:
        def work() -> None:
            try:
                if is_here:
                    stage()
            except OSError as error:  # some file systems, and quotas, do not state how much room there is
                if not is_full(error):
                    raise
                what = f"{self._output.root} is full: {error.strerror}; the checkpoint was not completed there"
                raise NoRoomError(what, hint=MAKE_ROOM) from error

        long_on_all_ranks(self._peers, work)

    def _prepare(self, plan: TransferPlan, working: Path) -> None:
        """Create the working folder: allocate the missing files, and link or copy the output folder's good files."""
        for earlier in self._output.work.glob(f"resume-{checkpoint_name(plan.manifest.step)}-*"):
            with contextlib.suppress(OSError):  # a folder that cannot be deleted stays, and is not used
                delete_tree(earlier)
        create_files([entry for entry in plan.manifest.files if plan.lacks(self._rank, entry)], working)
        copy = plan.copies[self._rank]
        for path in sorted(copy.good):
            with refusing_impossible_path(path):
                no_links.make_folders((working / path).parent)
                link_or_copy(copy.path / path, working / path)

    def _fetch(self, plan: TransferPlan, working: Path) -> None:
        """Fetch this rank's share of the files that no folder has."""
        windows = [window for window, rank in plan.fetchers.items() if rank == self._rank]
        counter = ByteCounter(self._watch("fetching"), sum(window.size_bytes for window in windows))
        if windows:
            assert self._store is not None
            fetch(self._store, checkpoint_name(plan.manifest.step), windows, working, progress=counter.add)

    def _exchange(self, plan: TransferPlan, working: Path) -> None:
        """Exchange the files that folders lack.

        Even after an error, an owner takes part in all further transfers, because the other owners would wait for it.
        """
        copy, transfers = plan.copies[self._rank], list(self._transfers(plan))
        counter = ByteCounter(self._watch("exchanging"), sum(window.size_bytes for window, _, _ in transfers))
        largest_bytes = max((window.size_bytes for window, _, _ in transfers), default=0)
        buffer = torch.empty(largest_bytes, dtype=torch.uint8)
        problem: SafepointError | OSError | None = None
        for window, source, is_missing in transfers:
            block = buffer[: window.size_bytes]
            if source == self._rank:
                root = copy.path if window.path in copy.good else working
                try:
                    _read_into(root / window.path, window.start, block, below=root.parent)
                except OSError as error:
                    problem = problem or error
            if window.size_bytes and self._sender is not None:
                self._sender.send(block, source)
            if is_missing and problem is None:
                try:
                    _write_from(block, working / window.path, window)
                except (SafepointError, OSError) as error:
                    problem = error
            counter.add(window.size_bytes)
        if problem is not None:
            raise problem

    def _transfers(self, plan: TransferPlan) -> Iterator[tuple[Window, int, bool]]:
        """Each window that a folder lacks, the owner that sends it, and whether this rank needs it."""
        for entry in plan.manifest.files:
            source = plan.source[entry.path]
            for window in windows_of([entry]):
                sender = self._folders.owner_of[plan.fetchers[window]] if source is None else source
                if any(plan.lacks(owner, entry) for owner in self._folders.owners if owner != sender):
                    yield window, sender, plan.lacks(self._rank, entry) and sender != self._rank

    def _commit(self, manifest: Manifest, working: Path, target: Path | None) -> None:
        target = target or self._output.root / checkpoint_name(manifest.step)
        no_links.make_folders(target.parent)
        commit(FolderDestination(working, target, trash=self._output.trash, is_durable=False), manifest)

    def _watch(self, what: str) -> Callable[[int, int], None] | None:
        return ProgressLine(what).update if self._peers.place.is_first else None


def _read_into(path: Path, start: int, block: torch.Tensor, *, below: Path) -> None:
    content, done = block.numpy().data, 0
    with open_regular(path, below=below) as file:
        while done < len(block):
            count = os.preadv(file.fileno(), [content[done:]], start + done)
            if not count:
                raise OSError(f"{path} ends too early")
            done += count


def _write_from(block: torch.Tensor, path: Path, window: Window) -> None:
    content = block.numpy().data
    if digest_bytes(content) != window.digest:
        raise CheckpointError(f"{window.path} was damaged in the transfer from another node")
    descriptor = no_links.open_file(path, os.O_WRONLY)
    try:
        write_at(descriptor, content, window.start)
    finally:
        os.close(descriptor)
