"""Checkpoints in an object store: which are there, how one is published, and who may (docs/adr/0007).

Promises: a checkpoint is in the store exactly while its manifest is, and the manifest is written last and deleted
first; a writer that was replaced by a newer attempt publishes nothing; what Holdfast has not begun itself is never
deleted. While a checkpoint is being written or deleted, `.holdfast/unfinished/<name>` says so.
"""

import contextlib
import json
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import Enum, auto
from pathlib import Path

from holdfast.checkpoint.catalog import checkpoint_name, step_of
from holdfast.checkpoint.digest import digest_bytes, digest_file
from holdfast.checkpoint.final import FINAL
from holdfast.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileEntry, Manifest
from holdfast.checkpoint.part import NodePart
from holdfast.checkpoint.retention import Candidate, KeepNewest, Policy, select_superseded
from holdfast.checkpoint.verify import compare_listing
from holdfast.errors import (
    CheckpointError,
    ConditionError,
    ConflictError,
    ManifestError,
    ObjectNotFoundError,
    StorageError,
)
from holdfast.foundation import clock
from holdfast.foundation.files import write_atomic
from holdfast.foundation.units import printable
from holdfast.storage.access import PROBE_PREFIX
from holdfast.storage.store import ABSENT, Condition, Progress, Store, StoredObject

ATTEMPT_KEY = ".holdfast/attempt.json"
_UNFINISHED = ".holdfast/unfinished"
_PARTS = ".holdfast/parts"
"""`<name>/<node>-of-<nodes>` holds the manifest of which that node has uploaded its files."""
_PART_KEY = re.compile(rf"{re.escape(_PARTS)}/([^/]+)/(0|[1-9][0-9]{{0,6}})-of-([1-9][0-9]{{0,6}})")
_PROBE_LIVES_S = 3600.0
_MAX_ATTEMPT_BYTES = 1 << 16
_NUM_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who may publish.

    Args:
        run_id: the run.
        attempt: which start of it.
        attempt_id: unique to this start.
        since: RFC 3339 UTC.
        host: where its first rank runs, for people.
    """

    run_id: str
    attempt: int
    attempt_id: str
    since: str
    host: str


class Published(Enum):
    """What became of a checkpoint that was to be published."""

    BEFORE = auto()
    """It was there already."""
    NOW = auto()
    """It is committed now."""
    IN_PART = auto()
    """This node's files are there, and other nodes' are not yet."""


class RemoteFolder:
    """The checkpoints of a run in an object store.

    Args:
        store: at the run's location.
        attempt_id: this start of the run, once it has claimed the location; None is for looking, and for work
            while nobody has.
        passed_over: steps whose checkpoints this start found damaged: they count for no policy.
    """

    def __init__(self, store: Store, *, attempt_id: str | None = None, passed_over: Collection[int] = ()) -> None:
        self.store = store
        self._passed_over = set(passed_over)
        self._attempt_id = attempt_id
        self._candidates: dict[int, Candidate] = {}
        self._seen_claim: str | None = None
        self._has_looked = False

    @classmethod
    def as_guest(cls, store: Store) -> "RemoteFolder":
        """For work beside a run, which may be using the location: nothing is written once another run takes over."""
        holder = cls(store).claimed_by()
        return cls(store, attempt_id=holder.attempt_id if holder else None)

    # ---- looking --------------------------------------------------------------------------------------------

    def steps(self, *, deadline_s: float | None = None) -> list[int]:
        """The steps of the checkpoints that have a manifest, newest first."""
        found = self._by_checkpoint(deadline_s)
        return sorted((step for step, keys in found.items() if _manifest_key(step) in keys), reverse=True)

    def foreign_steps(self, *, deadline_s: float | None = None) -> list[int]:
        """Folders with a checkpoint's name, without a manifest, and not begun by Holdfast; newest first."""
        unfinished = self.unfinished(deadline_s=deadline_s)
        found = self._by_checkpoint(deadline_s)
        steps = [step for step, keys in found.items() if _manifest_key(step) not in keys]
        return sorted((step for step in steps if checkpoint_name(step) not in unfinished), reverse=True)

    def unfinished(self, *, deadline_s: float | None = None) -> set[str]:
        """The names under which Holdfast has begun to write or delete, and not ended."""
        names = {
            item.key.removeprefix(f"{_UNFINISHED}/") for item in self.store.list(_UNFINISHED, deadline_s=deadline_s)
        }
        return {name for name in names if _is_name(name)}  # whatever else somebody has put there names nothing

    def manifest(self, step: int, *, deadline_s: float | None = None) -> Manifest:
        """The manifest of the checkpoint of `step`.

        Raises:
            ManifestError: there is none, or it is unacceptable.
        """
        manifest = self.manifest_of(checkpoint_name(step), deadline_s=deadline_s)
        if manifest.step != step:
            raise ManifestError(f"it says step {manifest.step}, the folder's name says {step}")
        return manifest

    def manifest_of(self, folder: str, *, deadline_s: float | None = None) -> Manifest:
        """The manifest in `folder`, such as `final`.

        Raises:
            ManifestError: there is none, or it is unacceptable.
        """
        data = self.bytes_of_manifest(folder, deadline_s=deadline_s)
        if data is None:
            raise ManifestError("there is none, so this is not a checkpoint")
        return Manifest.from_bytes(data)

    def bytes_of_manifest(self, folder: str, *, deadline_s: float | None = None) -> bytes | None:
        """The manifest in `folder` as it is, or None when there is none.

        Raises:
            ManifestError: it is too large to be one.
        """
        key = f"{folder}/{MANIFEST_NAME}"
        try:
            size_bytes = self.store.stat(key, deadline_s=deadline_s).size_bytes
            if size_bytes > MAX_MANIFEST_BYTES:
                raise ManifestError(f"it is larger than {MAX_MANIFEST_BYTES} bytes")
            return bytes(self.store.read(key, length=size_bytes, deadline_s=deadline_s))
        except ObjectNotFoundError:
            return None

    def superseded(self, policies: Sequence[Policy], *, deadline_s: float | None = None) -> list[int]:
        """The steps that no policy keeps, oldest first; see `select_superseded`."""
        steps = [step for step in self.steps(deadline_s=deadline_s) if step not in self._passed_over]
        if all(isinstance(policy, KeepNewest) for policy in policies):  # needs to know nothing but the steps
            candidates = [Candidate(step=step) for step in steps]
        else:
            candidates = [found for step in steps if (found := self._candidate(step, deadline_s)) is not None]
        return select_superseded(candidates, policies, now_s=clock.wall_s())

    def _candidate(self, step: int, deadline_s: float | None) -> Candidate | None:
        if step not in self._candidates:
            try:
                self._candidates[step] = Candidate.of(self.manifest(step, deadline_s=deadline_s))
            except ManifestError:
                return None
        return self._candidates[step]

    def finish_parts(self, *, deadline_s: float | None = None) -> list[str]:
        """Commit what all nodes of a dead attempt have uploaded and none came to commit; call it after `claim`.

        Returns:
            The names of what is a checkpoint now.
        """
        committed: list[str] = []
        for name, records in self._parts(deadline_s).items():
            data = self._agreed_manifest(name, records, deadline_s)
            if data is None or self.bytes_of_manifest(name, deadline_s=deadline_s) == data:
                continue
            found = {
                item.key.removeprefix(f"{name}/"): item.size_bytes
                for item in self.store.list(name, deadline_s=deadline_s)
            }
            if not compare_listing(Manifest.from_bytes(data).files, found):
                self._finish(name, data, deadline_s)
                committed.append(name)
        return committed

    def _parts(self, deadline_s: float | None) -> dict[str, dict[int, tuple[int, str]]]:
        """What nodes say to have uploaded: name → node → number of nodes, key."""
        found: dict[str, dict[int, tuple[int, str]]] = {}
        for item in self.store.list(_PARTS, deadline_s=deadline_s):
            match = _PART_KEY.fullmatch(item.key)
            if match is not None and _is_name(match[1]):
                found.setdefault(match[1], {})[int(match[2])] = int(match[3]), item.key
        return found

    def _agreed_manifest(
        self, name: str, records: Mapping[int, tuple[int, str]], deadline_s: float | None
    ) -> bytes | None:
        """The manifest that all nodes name, or None while one is missing or names another."""
        counts = {num_nodes for num_nodes, _ in records.values()}
        if len(counts) != 1 or set(records) != set(range(max(counts))):
            return None
        contents: set[bytes] = set()
        for _, key in records.values():
            with contextlib.suppress(ObjectNotFoundError):
                contents.add(bytes(self.store.read(key, deadline_s=deadline_s)))
        if len(contents) != 1:
            return None
        data = contents.pop()
        try:
            step = Manifest.from_bytes(data).step
        except ManifestError:
            return None
        return data if step_of(Path(name)) in {None, step} else None

    def _by_checkpoint(self, deadline_s: float | None) -> dict[int, dict[str, StoredObject]]:
        found: dict[int, dict[str, StoredObject]] = {}
        for item in self.store.list(deadline_s=deadline_s):
            step = step_of(Path(item.key.partition("/")[0]))
            if step is not None and "/" in item.key:
                found.setdefault(step, {})[item.key] = item
        return found

    # ---- who may --------------------------------------------------------------------------------------------

    def claimed_by(self, *, deadline_s: float | None = None) -> Claim | None:
        """Who may publish now; a `claim` that follows replaces this one and no other."""
        self._has_looked = True
        holder, self._seen_claim = self._read_claim(deadline_s)
        return holder

    def claim(self, claim: Claim, *, deadline_s: float | None = None) -> None:
        """Become the one who may publish; whoever could before, as `claimed_by` said, no longer can.

        Raises:
            ConflictError: another attempt has claimed the location since.
        """
        if not self._has_looked:
            self.claimed_by(deadline_s=deadline_s)
        condition = ABSENT if self._seen_claim is None else Condition(version=self._seen_claim)
        data = json.dumps(asdict(claim)).encode()
        try:
            self._seen_claim = self.store.write(ATTEMPT_KEY, data, condition=condition, deadline_s=deadline_s)
        except ConditionError as error:
            raise ConflictError(
                f"another run began to use {self.store.location} at the same moment; training was not started",
                hint="stop one of them, or give each a location of its own",
            ) from error
        self._attempt_id = claim.attempt_id

    def fence(self, *, deadline_s: float | None = None) -> None:
        """Go on only while nobody else has claimed the location.

        Raises:
            ConflictError: somebody has.
        """
        holder = self._read_claim(deadline_s)[0]
        if (holder.attempt_id if holder else None) != self._attempt_id:
            if holder is None:
                who = "no longer this attempt's: .holdfast/attempt.json is gone"
            else:
                who = f"now used by attempt {holder.attempt} of run {holder.run_id[:8]} on {holder.host}"
            raise ConflictError(
                f"{self.store.location} is {who}; nothing more is written there",
                hint="what was to be uploaded remains where it is",
            )

    def _read_claim(self, deadline_s: float | None) -> tuple[Claim | None, str | None]:
        try:
            found = self.store.stat(ATTEMPT_KEY, deadline_s=deadline_s)
            length = min(found.size_bytes, _MAX_ATTEMPT_BYTES)
            data = bytes(self.store.read(ATTEMPT_KEY, length=length, deadline_s=deadline_s))
        except ObjectNotFoundError:
            return None, None
        try:
            return Claim(**json.loads(data)), found.version
        except (ValueError, TypeError):
            return None, found.version

    def clean(self, *, keep: Collection[str], deadline_s: float | None = None) -> int:
        """Delete what dead attempts left unfinished; call it after `claim`.

        Args:
            keep: names of checkpoints that this attempt holds itself and is going to upload.
            deadline_s: when to give up.

        Returns:
            How many objects and uploads were deleted.
        """
        num_deleted = 0
        for name in sorted(self.unfinished(deadline_s=deadline_s)):
            if name in keep:
                continue
            named: set[str] = set()
            with contextlib.suppress(ManifestError):
                manifest = self.manifest_of(name, deadline_s=deadline_s)
                named = {MANIFEST_NAME, *(entry.path for entry in manifest.files)}
            num_deleted += self._delete_but(name, named, deadline_s)
            self._forget(name, deadline_s)
        for item in list(self.store.list(".holdfast", deadline_s=deadline_s)):
            if item.key.startswith(PROBE_PREFIX) and clock.wall_s() - item.modified_s > _PROBE_LIVES_S:
                self.store.delete(item.key, deadline_s=deadline_s)
                num_deleted += 1
        return num_deleted + self.store.sweep(
            chosen=lambda key: _is_ours(key) and key.partition("/")[0] not in keep, deadline_s=deadline_s
        )

    def _delete_but(self, name: str, named: Collection[str], deadline_s: float | None) -> int:
        """Delete what is in the folder `name` and not called one of `named`; say how much that was."""
        # What is listed before the fence is what is deleted: a successor may have written the same keys since.
        keys = [item.key for item in self.store.list(name, deadline_s=deadline_s)]
        doomed = [key for key in keys if key.removeprefix(f"{name}/") not in named]
        self.fence(deadline_s=deadline_s)
        for key in doomed:
            self.store.delete(key, deadline_s=deadline_s)
        return len(doomed)

    # ---- publishing -----------------------------------------------------------------------------------------

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
        present = self.bytes_of_manifest(name, deadline_s=deadline_s)
        if present == data:
            record.unlink(missing_ok=True)
            return Published.BEFORE
        self._candidates.pop(manifest.step, None)
        if present is None:
            self._refuse_foreign(name, deadline_s)
        self.fence(deadline_s=deadline_s)
        self.store.write(f"{_UNFINISHED}/{name}", b"", deadline_s=deadline_s)
        if present is not None and not _is_extended(present, manifest):
            # Another node that does the same cannot delete what this one helps to commit: its part is still missing.
            self.store.delete(f"{name}/{MANIFEST_NAME}", deadline_s=deadline_s)
        sent = _SentRecord(record, digest_bytes(data))

        def send(entry: FileEntry) -> None:
            self._send(folder, name, entry, sent, progress, deadline_s)

        entries = manifest.files if part is None else part.files
        # Small files side by side, because each is mostly waiting; a large one is sent in parallel parts by itself.
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="holdfast-publish") as threads:
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
        if part is not None and not self._add_part(name, part, data, deadline_s):
            return Published.IN_PART
        self._finish(name, data, deadline_s)
        record.unlink(missing_ok=True)
        return Published.NOW

    def _add_part(self, name: str, part: NodePart, data: bytes, deadline_s: float | None) -> bool:
        """Say that this node's files are there; return whether those of all nodes are."""
        # Uploads into the same files by a writer that was replaced end here; other nodes' are under way.
        own = {f"{name}/{path}" for path in part.paths}
        self.store.sweep(chosen=lambda key: key in own, deadline_s=deadline_s)
        self.fence(deadline_s=deadline_s)
        self.store.write(f"{_PARTS}/{name}/{part.node}-of-{part.num_nodes}", data, deadline_s=deadline_s)
        records = self._parts(deadline_s).get(name, {})
        return self._agreed_manifest(name, records, deadline_s) == data

    def _finish(self, name: str, data: bytes, deadline_s: float | None) -> None:
        """Commit what is there in full, and tidy up."""
        manifest = Manifest.from_bytes(data)
        # Uploads of a writer that was replaced end here, and what an earlier checkpoint of this step has left.
        self.store.sweep(chosen=lambda other: other.startswith(f"{name}/"), deadline_s=deadline_s)
        self._delete_but(name, {MANIFEST_NAME, *(entry.path for entry in manifest.files)}, deadline_s)
        self._commit(name, data, deadline_s)
        self._passed_over.discard(manifest.step)
        with contextlib.suppress(StorageError):  # it is committed; the next start tidies up
            self._forget(name, deadline_s)

    def _forget(self, name: str, deadline_s: float | None) -> None:
        """Delete the marks of what is finished or gone."""
        for item in list(self.store.list(f"{_PARTS}/{name}", deadline_s=deadline_s)):
            self.store.delete(item.key, deadline_s=deadline_s)
        self.store.delete(f"{_UNFINISHED}/{name}", deadline_s=deadline_s)

    def _refuse_foreign(self, name: str, deadline_s: float | None) -> None:
        if name in self.unfinished(deadline_s=deadline_s):
            return
        found = next(iter(self.store.list(name, deadline_s=deadline_s)), None)
        # Asked again: another node of this run may have begun in between.
        if found is not None and name not in self.unfinished(deadline_s=deadline_s):
            raise StorageError(
                f"{self.store.location.child(name)} holds files that Holdfast has not written, such as "
                f"{printable(found.key)}; nothing was written there",
                hint="move them away, or name another location",
            )

    def _commit(self, name: str, data: bytes, deadline_s: float | None) -> None:
        key, condition = f"{name}/{MANIFEST_NAME}", ABSENT
        with contextlib.suppress(ObjectNotFoundError):  # of the same checkpoint with fewer files
            condition = Condition(version=self.store.stat(key, deadline_s=deadline_s).version)
        self.fence(deadline_s=deadline_s)
        try:
            self.store.write(key, data, condition=condition, deadline_s=deadline_s)
        except ConditionError:
            # Somebody else of this attempt may have done the same.
            if self.bytes_of_manifest(name, deadline_s=deadline_s) != data:
                raise

    def _send(
        self,
        folder: Path,
        name: str,
        entry: FileEntry,
        sent: "_SentRecord",
        progress: Progress | None,
        deadline_s: float | None,
    ) -> None:
        store, target, source = self.store, f"{name}/{entry.path}", folder / entry.path
        known = sent.version_of(entry.path)
        if known is not None:
            with contextlib.suppress(ObjectNotFoundError):
                found = store.stat(target, deadline_s=deadline_s)
                if (found.version, found.size_bytes) == (known, entry.size_bytes):
                    if progress is not None:
                        progress(entry.size_bytes)
                    return
        # Disks lie, people edit: what is not what the manifest names must not stand under it.
        content = digest_file(source)
        if (content.size_bytes, content.digest) != (entry.size_bytes, entry.digest):
            raise CheckpointError(
                f"{source} has changed since its checkpoint was committed; {name} is not uploaded",
                hint="see `holdfast checkpoints verify --deep`",
            )
        store.upload(
            target,
            source,
            fence=lambda: self.fence(deadline_s=deadline_s),
            progress=progress,
            deadline_s=deadline_s,
        )
        sent.add(entry.path, store.stat(target, deadline_s=deadline_s).version)

    def take_down(self, folder: str, *, deadline_s: float | None = None) -> None:
        """Delete the checkpoint in `folder`, such as `checkpoint-20`, its manifest first.

        Raises:
            ConflictError: another attempt has claimed the location.
        """
        self.fence(deadline_s=deadline_s)
        self.store.write(f"{_UNFINISHED}/{folder}", b"", deadline_s=deadline_s)
        self.store.delete(f"{folder}/{MANIFEST_NAME}", deadline_s=deadline_s)
        self._delete_but(folder, (), deadline_s)
        self._forget(folder, deadline_s)


def _is_extended(present: bytes, manifest: Manifest) -> bool:
    """Whether the manifest in the store stays true while `manifest`'s further files arrive beside its own."""
    try:
        files = Manifest.from_bytes(present).files
    except ManifestError:
        return False
    return set(files) < set(manifest.files)


def _is_ours(key: str) -> bool:
    """Whether Holdfast writes under this key, and nobody else who shares the bucket."""
    top, slash, _ = key.partition("/")
    return bool(slash) and (top == ".holdfast" or _is_name(top))


def _is_name(text: str) -> bool:
    """Whether a checkpoint or the final model can be called so."""
    return text == FINAL or (step_of(Path(text)) is not None and "/" not in text)


class _SentRecord:
    """Which files of a checkpoint are in the store, as what version; survives the process."""

    def __init__(self, path: Path, manifest_digest: str) -> None:
        self._path = path
        self._digest = manifest_digest
        self._lock = threading.Lock()
        self._versions: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            noted = json.loads(path.read_bytes())
            if noted["manifest"] == manifest_digest:
                self._versions = {str(name): str(version) for name, version in noted["versions"].items()}

    def version_of(self, path: str) -> str | None:
        return self._versions.get(path)

    def add(self, path: str, version: str) -> None:
        with self._lock, contextlib.suppress(OSError):  # without it the file is sent once more
            self._versions[path] = version
            data = json.dumps({"manifest": self._digest, "versions": self._versions}).encode()
            write_atomic(self._path, data, durable=False)


def _manifest_key(step: int) -> str:
    return f"{checkpoint_name(step)}/{MANIFEST_NAME}"


__all__ = ["ATTEMPT_KEY", "Claim", "Published", "RemoteFolder"]
