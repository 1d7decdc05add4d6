"""Checkpoints in an object store: which are there, how one is published, and who may (docs/adr/0007).

Promises: a checkpoint is in the store exactly while its manifest is, and the manifest is written last and deleted
first; a writer that was replaced by a newer attempt publishes nothing.
"""

import contextlib
import json
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.checkpoint.catalog import checkpoint_name, step_of
from holdfast.checkpoint.digest import digest_bytes
from holdfast.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest
from holdfast.checkpoint.retention import Candidate, KeepNewest, Policy, select_superseded
from holdfast.errors import ConditionError, ConflictError, ManifestError, ObjectNotFoundError
from holdfast.foundation import clock
from holdfast.foundation.files import write_atomic
from holdfast.storage.store import ABSENT, Condition, Progress, Store, StoredObject

ATTEMPT_KEY = ".holdfast/attempt.json"
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


class RemoteFolder:
    """The checkpoints of a run in an object store.

    Args:
        store: at the run's location.
        attempt_id: this start of the run, once it has claimed the location; None only looks.
    """

    def __init__(self, store: Store, *, attempt_id: str | None = None) -> None:
        self.store = store
        self._attempt_id = attempt_id
        self._candidates: dict[int, Candidate] = {}

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
        steps = self.steps(deadline_s=deadline_s)
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

    def _by_checkpoint(self, deadline_s: float | None) -> dict[int, dict[str, StoredObject]]:
        found: dict[int, dict[str, StoredObject]] = {}
        for item in self.store.list(deadline_s=deadline_s):
            step = step_of(Path(item.key.partition("/")[0]))
            if step is not None and "/" in item.key:
                found.setdefault(step, {})[item.key] = item
        return found

    # ---- who may --------------------------------------------------------------------------------------------

    def claimed_by(self, *, deadline_s: float | None = None) -> Claim | None:
        """Who may publish now."""
        return self._read_claim(deadline_s)[0]

    def claim(self, claim: Claim, *, deadline_s: float | None = None) -> None:
        """Become the one who may publish; whoever could before no longer can.

        Raises:
            ConflictError: another attempt claimed the location at the same moment.
        """
        _, version = self._read_claim(deadline_s)
        condition = ABSENT if version is None else Condition(version=version)
        try:
            self.store.write(
                ATTEMPT_KEY, json.dumps(asdict(claim)).encode(), condition=condition, deadline_s=deadline_s
            )
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
            who = f"attempt {holder.attempt} of run {holder.run_id[:8]} on {holder.host}" if holder else "nobody"
            raise ConflictError(
                f"{self.store.location} is now used by {who}; nothing more is written there",
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

    def clean(self, *, keep_steps: Collection[int], deadline_s: float | None = None) -> int:
        """Delete what dead attempts left unfinished; call it after `claim`.

        Args:
            keep_steps: checkpoints that this attempt holds itself and is going to upload.
            deadline_s: when to give up.

        Returns:
            How many objects and uploads were deleted.
        """
        found = self._by_checkpoint(deadline_s)
        torn = [
            key
            for step, keys in found.items()
            if _manifest_key(step) not in keys and step not in keep_steps
            for key in keys
        ]
        for key in torn:
            self.store.delete(key, deadline_s=deadline_s)
        kept = [checkpoint_name(step) for step in keep_steps]
        return len(torn) + self.store.sweep(keep=kept, deadline_s=deadline_s)

    # ---- publishing -----------------------------------------------------------------------------------------

    def publish(
        self,
        folder: Path,
        *,
        name: str,
        record: Path,
        progress: Progress | None = None,
        deadline_s: float | None = None,
    ) -> bool:
        """Upload a committed checkpoint and commit it in the store; what is there already is not sent again.

        Args:
            folder: a committed checkpoint, kept from deletion by the caller.
            name: its name in the store.
            record: where to note what has been sent, for the next process if this one ends.
            progress: told the bytes that are in the store, also of what was there already.
            deadline_s: when to give up.

        Returns:
            False when it was there already.

        Raises:
            ConflictError: another attempt has claimed the location.
            StorageError: it did not arrive.
        """
        data = (folder / MANIFEST_NAME).read_bytes()
        manifest = Manifest.from_bytes(data)
        key = f"{name}/{MANIFEST_NAME}"
        present = self.bytes_of_manifest(name, deadline_s=deadline_s)
        if present == data:
            return False
        self._candidates.pop(manifest.step, None)
        self.fence(deadline_s=deadline_s)
        if present is not None:
            self.store.delete(key, deadline_s=deadline_s)
        sent = _SentRecord(record, digest_bytes(data))
        store = self.store

        def send(path: str) -> None:
            target, size_bytes = f"{name}/{path}", (folder / path).stat().st_size
            known = sent.version_of(path)
            if known is not None:
                with contextlib.suppress(ObjectNotFoundError):
                    found = store.stat(target, deadline_s=deadline_s)
                    if (found.version, found.size_bytes) == (known, size_bytes):
                        if progress is not None:
                            progress(size_bytes)
                        return
            store.upload(
                target,
                folder / path,
                fence=lambda: self.fence(deadline_s=deadline_s),
                progress=progress,
                deadline_s=deadline_s,
            )
            sent.add(path, store.stat(target, deadline_s=deadline_s).version)

        # Small files side by side, because each is mostly waiting; a large one is sent in parallel parts by itself.
        small = [entry.path for entry in manifest.files if not entry.parts]
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="holdfast-publish") as threads:
            for future in [threads.submit(send, path) for path in small]:
                future.result()
        for entry in manifest.files:
            if entry.parts:
                send(entry.path)
        self._delete_others(name, {entry.path for entry in manifest.files}, deadline_s)
        self.fence(deadline_s=deadline_s)
        try:
            store.write(key, data, condition=ABSENT, deadline_s=deadline_s)
        except ConditionError:
            if (
                self.bytes_of_manifest(name, deadline_s=deadline_s) != data
            ):  # somebody else of this attempt may have done the same
                raise
        record.unlink(missing_ok=True)
        return True

    def _delete_others(self, name: str, named: set[str], deadline_s: float | None) -> None:
        """Left by an earlier checkpoint of the same step: a file that the manifest does not name makes it invalid."""
        for item in list(self.store.list(name, deadline_s=deadline_s)):
            if item.key.removeprefix(f"{name}/") not in named:
                self.store.delete(item.key, deadline_s=deadline_s)

    def take_down(self, step: int, *, deadline_s: float | None = None) -> None:
        """Delete a checkpoint, its manifest first.

        Raises:
            ConflictError: another attempt has claimed the location.
        """
        self.take_down_folder(checkpoint_name(step), deadline_s=deadline_s)

    def take_down_folder(self, folder: str, *, deadline_s: float | None = None) -> None:
        """The same by the folder's name, such as `final`."""
        self.fence(deadline_s=deadline_s)
        self.store.delete(f"{folder}/{MANIFEST_NAME}", deadline_s=deadline_s)
        for item in list(self.store.list(folder, deadline_s=deadline_s)):
            self.store.delete(item.key, deadline_s=deadline_s)


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


__all__ = ["ATTEMPT_KEY", "Claim", "RemoteFolder"]
