"""Taking a checkpoint into an object store: data first, the manifest last, from one node or from several.

Promises: see `remote`, and docs/adr/0007 and 0008; whatever fails on the way, the next try sends what is missing.
"""

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from pathlib import Path

from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileEntry, Manifest
from safepoint.checkpoint.format.node_part import NodePart
from safepoint.checkpoint.format.verify import compare_listing
from safepoint.checkpoint.local.upload_record import UploadRecord
from safepoint.checkpoint.remote.remote_folder import PARTS, UNFINISHED, RemoteFolder, is_name
from safepoint.checkpoint.remote.stream_digest import digesting
from safepoint.errors import CheckpointError, ConditionError, ManifestError, ObjectNotFoundError, StorageError
from safepoint.foundation import clock
from safepoint.foundation.units import printable
from safepoint.storage.store import ABSENT, Condition, Progress, Store

_MARK = re.compile(r"([^/]+)/([0-9a-f]{32})/(0|[1-9][0-9]{0,6})-of-([1-9][0-9]{0,6})")
_NUM_THREADS = 4


class Published(Enum):
    """What became of a checkpoint that was to be published."""

    BEFORE = auto()
    """It was there already."""
    NOW = auto()
    """It is committed now."""
    IN_PART = auto()
    """This node's files are there, and other nodes' are not yet."""


class Publisher:
    """Publishes checkpoints into a claimed location.

    Args:
        remote: the location.
    """

    def __init__(self, remote: RemoteFolder) -> None:
        self._remote = remote
        self._store = remote.store

    def publish(
        self,
        folder: Path,
        *,
        name: str,
        record: Path,
        part: NodePart | None = None,
        progress: Progress | None = None,
        deadline_s: float | None = None,
    ) -> Published:
        """Upload a committed checkpoint and commit it in the store; what is there already is not sent again.

        Args:
            folder: a committed checkpoint, kept from deletion by the caller.
            name: its name in the store.
            record: where to note what has been sent, for the next process if this one ends.
            part: what of the checkpoint the folder holds; None for all of it. Whichever node finds that all parts
                are there commits the whole.
            progress: told the bytes that are in the store, also of what was there already.
            deadline_s: when to give up.

        Raises:
            ConflictError: another attempt has claimed the location.
            StorageError: it did not arrive, or somebody else's files lie under its name.
        """
        data = (folder / MANIFEST_NAME).read_bytes() if part is None else part.manifest.to_bytes()
        manifest = Manifest.from_bytes(data)
        present = self._remote.bytes_of_manifest(name, deadline_s=deadline_s)
        if present == data:
            record.unlink(missing_ok=True)
            return Published.BEFORE
        self._begin(name, present, deadline_s, is_kept=present is not None and _is_extended(present, manifest))
        marks = None
        if part is not None:
            marks = _Marks(self._store, name, data)
            marks.begin(part.node, deadline_s)
        sent = UploadRecord(record)

        def send(entry: FileEntry) -> None:
            self._send(folder, name, entry, sent, progress, deadline_s)

        entries = manifest.files if part is None else part.files
        # Small files side by side, because each is mostly waiting; a large one is sent in parallel parts by itself.
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="safepoint-publish") as threads:
            futures = [threads.submit(send, entry) for entry in entries if not entry.parts]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        for entry in entries:
            if entry.parts:
                send(entry)
        if part is not None and marks is not None:
            # Uploads into the same files by a writer that was replaced end here; other nodes' are under way.
            own = {f"{name}/{path}" for path in part.paths}
            self._store.sweep(chosen=lambda key: key in own, deadline_s=deadline_s)
            self._remote.fence(deadline_s=deadline_s)
            marks.add(part.node, part.num_nodes, deadline_s)
            if not marks.are_complete(deadline_s):
                return Published.IN_PART
        self.finish(name, data, deadline_s=deadline_s)
        record.unlink(missing_ok=True)
        return Published.NOW

    def begin(self, name: str, *, deadline_s: float | None = None) -> None:
        """Mark that something is going to be written under `name`; what counts there now no longer does.

        Raises:
            ConflictError: another attempt has claimed the location.
            StorageError: somebody else's files lie under the name.
        """
        present = self._remote.bytes_of_manifest(name, deadline_s=deadline_s)
        self._begin(name, present, deadline_s, is_kept=False)

    def _begin(self, name: str, present: bytes | None, deadline_s: float | None, *, is_kept: bool) -> None:
        if present is None:
            self._refuse_foreign(name, deadline_s)
        self._remote.fence(deadline_s=deadline_s)
        self._store.write(f"{UNFINISHED}/{name}", b"", deadline_s=deadline_s)
        if present is not None and not is_kept:
            # Another node that does the same cannot delete what this one helps to commit: its part is still missing.
            self._store.delete(f"{name}/{MANIFEST_NAME}", deadline_s=deadline_s)

    def finish(self, name: str, data: bytes, *, deadline_s: float | None = None) -> None:
        """Commit what is there in full, and tidy up.

        Args:
            name: what was begun.
            data: its manifest.
            deadline_s: when to give up.

        Raises:
            ConflictError: another attempt has claimed the location.
            StorageError: it is not there in full.
        """
        manifest = Manifest.from_bytes(data)
        # Uploads of a writer that was replaced end here, and what an earlier checkpoint of this step has left.
        self._store.sweep(chosen=lambda other: other.startswith(f"{name}/"), deadline_s=deadline_s)
        faults = compare_listing(manifest.files, self._listing(name, deadline_s))
        if faults:
            where = self._store.location.child(name)
            raise StorageError(f"{where} is not committed, because somebody else changed it: {faults[0]}")
        self._remote.delete_but(name, {MANIFEST_NAME, *(entry.path for entry in manifest.files)}, deadline_s)
        self._commit(name, data, deadline_s)
        self._remote.note_commit(manifest.step)
        with contextlib.suppress(StorageError):  # it is committed; the next start tidies up
            self._remote.forget(name, deadline_s)

    def _listing(self, name: str, deadline_s: float | None) -> dict[str, int]:
        return {
            item.key.removeprefix(f"{name}/"): item.size_bytes
            for item in self._store.list(name, deadline_s=deadline_s)
        }

    def _refuse_foreign(self, name: str, deadline_s: float | None) -> None:
        if name in self._remote.unfinished(deadline_s=deadline_s):
            return
        found = next(iter(self._store.list(name, deadline_s=deadline_s)), None)
        # Asked again: another node of this run may have begun in between.
        if found is not None and name not in self._remote.unfinished(deadline_s=deadline_s):
            raise StorageError(
                f"{self._store.location.child(name)} holds files that Safepoint has not written, such as "
                f"{printable(found.key)}; nothing was written there",
                hint="move them away, or name another location",
            )

    def _commit(self, name: str, data: bytes, deadline_s: float | None) -> None:
        key, condition = f"{name}/{MANIFEST_NAME}", ABSENT
        with contextlib.suppress(ObjectNotFoundError):  # of the same checkpoint with fewer files
            condition = Condition(version=self._store.stat(key, deadline_s=deadline_s).version)
        self._remote.fence(deadline_s=deadline_s)
        try:
            self._store.write(key, data, condition=condition, deadline_s=deadline_s)
        except ConditionError:
            # Somebody else of this attempt may have done the same.
            if self._remote.bytes_of_manifest(name, deadline_s=deadline_s) != data:
                raise

    def _send(
        self,
        folder: Path,
        name: str,
        entry: FileEntry,
        sent: UploadRecord,
        progress: Progress | None,
        deadline_s: float | None,
    ) -> None:
        store, target, source = self._store, f"{name}/{entry.path}", folder / entry.path
        known = sent.version_of(entry)
        if known is not None:
            with contextlib.suppress(ObjectNotFoundError):
                found = store.stat(target, deadline_s=deadline_s)
                if (found.version, found.size_bytes) == (known, entry.size_bytes):
                    if progress is not None:
                        progress(entry.size_bytes)
                    return
        with digesting(source) as (passing, result):

            def fence() -> None:
                # Disks lie, people edit: what is not what the manifest names must not stand under it.
                found = result()
                if (found.size_bytes, found.digest) != (entry.size_bytes, entry.digest):
                    raise CheckpointError(
                        f"{source} has changed since its checkpoint was committed; {name} is not uploaded",
                        hint="see `safepoint checkpoints verify --deep`",
                    )
                self._remote.fence(deadline_s=deadline_s)

            store.upload(target, passing, fence=fence, progress=progress, deadline_s=deadline_s)
        sent.add(entry, store.stat(target, deadline_s=deadline_s).version)

    # ---- parts of several nodes --------------------------------------------------------------------------------

    def finish_parts(self, *, deadline_s: float | None = None) -> list[str]:
        """Commit what all nodes of a dead attempt have uploaded and none came to commit; call it after `claim`.

        Returns:
            The names of what is a checkpoint now.
        """
        committed: list[str] = []
        for name, data in _complete_marks(self._store, deadline_s):
            if self._remote.bytes_of_manifest(name, deadline_s=deadline_s) == data:
                continue
            if not compare_listing(Manifest.from_bytes(data).files, self._listing(name, deadline_s)):
                self.finish(name, data, deadline_s=deadline_s)
                committed.append(name)
        return committed

    def begun_by_nodes(self, *, deadline_s: float | None = None) -> set[str]:
        """What some node has begun to send, and is newer than everything that is complete in the store."""
        names = {key.partition("/")[0] for key in _keys_of_marks(self._store, deadline_s)}
        newest = max(self._remote.steps(deadline_s=deadline_s), default=-1) if names else -1
        return {name for name in names if is_name(name) and (step_of(Path(name)) or 0) > newest}

    def signs_of_life(self, name: str, *, deadline_s: float | None = None) -> frozenset[tuple[str, str, float]]:
        """Something that changes while any node sends its part of `name`, see `show_life`."""
        found = self._store.list(f"{PARTS}/{name}", deadline_s=deadline_s)
        return frozenset((item.key, item.version, item.modified_s) for item in found)

    def show_life(self, name: str, part: NodePart, *, deadline_s: float | None = None) -> None:
        """Let other nodes see that this one goes on sending."""
        with contextlib.suppress(StorageError):
            _Marks(self._store, name, part.manifest.to_bytes()).begin(part.node, deadline_s)


class _Marks:
    """What nodes say of one manifest of a checkpoint.

    Args:
        store: where.
        name: of the checkpoint.
        data: the manifest.
    """

    def __init__(self, store: Store, name: str, data: bytes) -> None:
        self._store = store
        self._data = data
        self._prefix = f"{PARTS}/{name}/{_hex_of(data)}"

    def begin(self, node: int, deadline_s: float | None) -> None:
        """A node is about to send its files, or still does."""
        self._store.write(f"{self._prefix}/begun-{node}", clock.utc_now().encode(), deadline_s=deadline_s)

    def add(self, node: int, num_nodes: int, deadline_s: float | None) -> None:
        """A node's files are there."""
        self._store.write(f"{self._prefix}/{node}-of-{num_nodes}", self._data, deadline_s=deadline_s)

    def are_complete(self, deadline_s: float | None) -> bool:
        """Whether the files of all nodes are there."""
        return any(data == self._data for _, data in _complete_marks(self._store, deadline_s))


def _complete_marks(store: Store, deadline_s: float | None) -> Iterator[tuple[str, bytes]]:
    """The name and the manifest of every checkpoint of which all nodes say that their files are there."""
    said: dict[tuple[str, str, int], set[int]] = {}
    for key in _keys_of_marks(store, deadline_s):
        match = _MARK.fullmatch(key)
        if match is not None and is_name(match[1]):
            said.setdefault((match[1], match[2], int(match[4])), set()).add(int(match[3]))
    for (name, digest, num_nodes), nodes in said.items():
        if nodes != set(range(num_nodes)):
            continue
        data: bytes | None = None
        key = f"{PARTS}/{name}/{digest}/0-of-{num_nodes}"
        with contextlib.suppress(ObjectNotFoundError):  # another node has just committed
            size_bytes = min(store.stat(key, deadline_s=deadline_s).size_bytes, MAX_MANIFEST_BYTES)
            data = bytes(store.read(key, length=size_bytes, deadline_s=deadline_s))
        if data is None or _hex_of(data) != digest:
            continue
        with contextlib.suppress(ManifestError):
            if step_of(Path(name)) in {None, Manifest.from_bytes(data).step}:
                yield name, data


def _keys_of_marks(store: Store, deadline_s: float | None) -> list[str]:
    return [item.key.removeprefix(f"{PARTS}/") for item in store.list(PARTS, deadline_s=deadline_s)]


def _hex_of(data: bytes) -> str:
    return digest_bytes(data).rpartition(":")[2]


def _is_extended(present: bytes, manifest: Manifest) -> bool:
    """Whether the manifest in the store stays true while `manifest`'s further files arrive beside its own."""
    try:
        files = Manifest.from_bytes(present).files
    except ManifestError:
        return False
    return set(files) < set(manifest.files)
