"""The checkpoints of a run in an object store, and the claim that says which attempt may write (docs/adr/0007).

Promises: a checkpoint counts as being in the store exactly while its manifest is there. The manifest is written last
and deleted first. A writer that was replaced by a newer attempt publishes nothing. Files that Safepoint has not
written are never deleted. While a checkpoint is being written or deleted, the store has a mark that lists its files:
the object `.safepoint/unfinished/<name>`.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from safepoint.checkpoint.format.catalog import checkpoint_name, fault_of_step, step_of
from safepoint.checkpoint.format.manifest import (
    MANIFEST_NAME,
    MAX_ATTEMPT,
    MAX_MANIFEST_BYTES,
    RUN_ID,
    Manifest,
    is_of_newer_release,
)
from safepoint.checkpoint.local.retention import Candidate, KeepNewest, Policy, select_superseded
from safepoint.checkpoint.remote.marks import MAX_MARK_BYTES, ListedFiles, Mark, is_name, within_time
from safepoint.checkpoint.remote.refusals import ATTEMPT_KEY, Refusals
from safepoint.errors import (
    AccessDeniedError,
    ConditionError,
    ConflictError,
    ManifestError,
    ObjectNotFoundError,
    UnreadableError,
    printable,
)
from safepoint.foundation import clock
from safepoint.foundation.bounded_json import parse_object
from safepoint.foundation.field_types import TEXT, check_fields, whole
from safepoint.storage.opening import is_probe
from safepoint.storage.store import ABSENT, WHOLE_BYTES, Condition, Store, StoredObject

UNFINISHED = ".safepoint/unfinished"
PARTS = ".safepoint/parts"
"""The marks of nodes that upload their parts; see `safepoint.checkpoint.remote.publish`."""
_log = logging.getLogger("safepoint")
_NUM_TRIES = 5
_PROBE_LIVES_S = 3600.0
_MAX_ATTEMPT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The attempt that may write to the location.

    Args:
        run_id: the identifier of the run.
        attempt: the number of the attempt in its run.
        attempt_id: a unique name of the attempt.
        since: when the attempt claimed the location, RFC 3339 UTC.
        host: the machine of the attempt's first rank, for messages.
    """

    run_id: str
    attempt: int
    attempt_id: str
    since: str
    host: str

    def __post_init__(self) -> None:
        attempt = whole(0, MAX_ATTEMPT)
        check_fields(self, {"run_id": RUN_ID, "attempt": attempt, "attempt_id": TEXT, "since": TEXT, "host": TEXT})


class RemoteFolder:
    """The checkpoints of a run in an object store.

    Args:
        store: the store at the run's location.
        attempt_id: the attempt that has claimed the location, and for which this object writes. None for reading, and
            for writing to a location without a claim.
        passed_over: steps whose checkpoints this start found damaged; policies do not count them.
    """

    def __init__(self, store: Store, *, attempt_id: str | None = None, passed_over: Collection[int] = ()) -> None:
        self.store = store
        self._passed_over = set(passed_over)
        self._attempt_id = attempt_id
        self._candidates: dict[int, Candidate | None] = {}
        self._committed: set[int] = set()
        self._seen_claim: Condition | None = None
        self.refusals = Refusals(store)

    @classmethod
    def as_guest(cls, store: Store) -> "RemoteFolder":
        """An object for commands during a run. It writes with the claim of the present attempt.

        After another attempt has claimed the location, the object writes nothing more.
        """
        holder = cls(store).claimed_by()
        return cls(store, attempt_id=holder.attempt_id if holder else None)

    # ---- reading --------------------------------------------------------------------------------------------

    def steps(self, *, deadline_s: float | None = None) -> list[int]:
        """The steps of the checkpoints that have a manifest, newest first."""
        found = self._have_manifests(deadline_s)
        return sorted((step for step, has_manifest in found.items() if has_manifest), reverse=True)

    def foreign_steps(self, *, deadline_s: float | None = None) -> list[int]:
        """The steps of folders that have a checkpoint's name, and that Safepoint has not written, newest first."""
        unfinished = self.unfinished(deadline_s=deadline_s)
        steps = [step for step, has_manifest in self._have_manifests(deadline_s).items() if not has_manifest]
        return sorted((step for step in steps if checkpoint_name(step) not in unfinished), reverse=True)

    def unfinished(self, *, deadline_s: float | None = None) -> set[str]:
        """The names of checkpoints and models that Safepoint has begun to write or delete, and has not finished."""
        listed = self.store.list(UNFINISHED, deadline_s=deadline_s)
        names = {item.key.removeprefix(f"{UNFINISHED}/") for item in listed}
        return {name for name in names if is_name(name)}  # other objects there are ignored

    def marked_files(self, name: str, *, deadline_s: float | None = None) -> dict[str, int]:
        """The files that the mark of `name` lists: path → size in bytes. A stranger may have written the mark."""
        sizes = self._read_mark(name, deadline_s)[0].sizes
        return {path: max(known) for path, known in sizes.items()}

    def _read_mark(self, name: str, deadline_s: float | None) -> tuple[Mark, Condition]:
        data, found = self._read(f"{UNFINISHED}/{name}", MAX_MARK_BYTES, deadline_s)
        if found is None:
            return Mark(), ABSENT
        return Mark.parse(data, found.modified_s), Condition(version=found.version)

    def manifest(self, step: int, *, deadline_s: float | None = None) -> Manifest:
        """The manifest of the checkpoint of `step`.

        Raises:
            ManifestError: there is no manifest, or it is not valid.
            UnreadableError: the manifest cannot be read, but other objects in the store can be read.
        """
        manifest = self.manifest_of(checkpoint_name(step), deadline_s=deadline_s)
        if fault := fault_of_step(manifest, Path(checkpoint_name(step))):
            raise ManifestError(fault.reason)
        return manifest

    def manifest_of(self, folder: str, *, deadline_s: float | None = None) -> Manifest:
        """The manifest in `folder`, such as `final`.

        Raises:
            ManifestError: there is no manifest, or it is not valid.
            UnreadableError: the manifest cannot be read, but other objects in the store can be read.
        """
        with self.refusals.as_fault(f"{folder}/{MANIFEST_NAME}", deadline_s=deadline_s):
            data = self.bytes_of_manifest(folder, deadline_s=deadline_s)
        if data is None:
            raise ManifestError("there is no manifest, so this is not a checkpoint")
        if not data:
            raise ManifestError(f"it is empty, or larger than {MAX_MANIFEST_BYTES} bytes")
        return Manifest.from_bytes(data)

    def bytes_of_manifest(self, folder: str, *, deadline_s: float | None = None) -> bytes | None:
        """The bytes of the manifest in `folder`; None when there is none, and empty if it is too large to be one."""
        key = f"{folder}/{MANIFEST_NAME}"
        try:
            size_bytes = self.store.stat(key, deadline_s=deadline_s).size_bytes
            if size_bytes > MAX_MANIFEST_BYTES:
                return b""
            return bytes(self.store.read(key, length=size_bytes, deadline_s=deadline_s))
        except ObjectNotFoundError:
            return None

    def is_newer_format(self, name: str, *, deadline_s: float | None = None) -> bool:
        """Whether a later release wrote the checkpoint called `name`. Callers do not replace or delete it."""
        return is_of_newer_release(self.bytes_of_manifest(name, deadline_s=deadline_s) or b"")

    def superseded(
        self,
        policies: Sequence[Policy],
        *,
        protected: Collection[int] = (),
        run_id: str | None = None,
        deadline_s: float | None = None,
    ) -> list[int]:
        """The steps that no policy keeps, oldest first; see `select_superseded`."""
        steps = [step for step in self.steps(deadline_s=deadline_s) if step not in self._passed_over]
        now_s = clock.wall_s()
        if all(isinstance(policy, KeepNewest) for policy in policies):
            # These policies use only the steps. If they keep all checkpoints as if these belonged to one run, they
            # also keep all checkpoints of each run. In this case, no manifest has to be read.
            as_one_run = [Candidate(step=step) for step in steps]
            if not select_superseded(as_one_run, policies, now_s=now_s, protected=protected):
                return []
        candidates = [found for step in steps if (found := self.candidate(step, policies, deadline_s)) is not None]
        # Only checkpoints of this attempt count as good. An older checkpoint may be damaged by now, and only a read
        # of all its files would show the damage.
        is_good = self._committed.__contains__
        return select_superseded(
            candidates, policies, now_s=now_s, protected=protected, is_good=is_good, run_id=run_id
        )

    def candidate(self, step: int, policies: Sequence[Policy], deadline_s: float | None) -> Candidate | None:
        """The facts for retention; None if the checkpoint was passed over, or if its manifest is unreadable. (Such a
        checkpoint may be good, so it is not deleted.) Each manifest is read once: strangers may have made many."""
        if step not in self._candidates:
            self._candidates[step] = None
            with contextlib.suppress(ManifestError, UnreadableError):
                self._candidates[step] = Candidate.of(self.manifest(step, deadline_s=deadline_s), policies)
        return None if step in self._passed_over else self._candidates[step]

    def files_of(self, name: str, *, deadline_s: float | None = None) -> dict[str, int]:
        """The objects under `name`, including the manifest: path → size in bytes."""
        return {path: item.size_bytes for path, item in self._objects(name, deadline_s).items()}

    def _objects(self, name: str, deadline_s: float | None) -> dict[str, StoredObject]:
        """The objects under `name`, by path."""
        found = self.store.list(name, deadline_s=deadline_s)
        return {item.key.removeprefix(f"{name}/"): item for item in found}

    def _have_manifests(self, deadline_s: float | None) -> dict[int, bool]:
        """The step of each folder that is named like a checkpoint → whether the folder has a manifest."""
        found: dict[int, bool] = {}
        for item in self.store.list(deadline_s=deadline_s):
            name, _, path = item.key.partition("/")
            step = step_of(Path(name))
            if step is not None and path:
                found[step] = found.get(step, False) or path == MANIFEST_NAME
        return found

    # ---- claiming -------------------------------------------------------------------------------------------

    def claimed_by(self, *, deadline_s: float | None = None) -> Claim | None:
        """The present claim; None if no attempt has claimed the location.

        If the claim changes before `claim` is called, `claim` fails.
        """
        holder, version = self._read_claim(deadline_s)
        self._seen_claim = ABSENT if version is None else Condition(version=version)
        return holder

    def claim(self, claim: Claim, *, deadline_s: float | None = None) -> None:
        """Claim the location for an attempt; the attempt that `claimed_by` returned cannot write any more.

        Raises:
            ConflictError: another attempt has claimed the location since `claimed_by` was called.
        """
        if self._seen_claim is None:
            self.claimed_by(deadline_s=deadline_s)
        data = json.dumps(asdict(claim)).encode()
        try:
            version = self.store.write(ATTEMPT_KEY, data, condition=self._seen_claim, deadline_s=deadline_s)
        except ConditionError as error:
            raise ConflictError(
                f"another run began to use {self.store.location} at the same moment; training was not started",
                hint="stop one of the two runs, or give each run a location of its own",
            ) from error
        self._seen_claim = Condition(version=version)
        self._attempt_id = claim.attempt_id

    def fence(self, *, deadline_s: float | None = None) -> None:
        """Check that the location is still claimed by this attempt.

        Raises:
            ConflictError: another attempt has claimed the location, or the claim was deleted.
        """
        holder = self._read_claim(deadline_s)[0]
        if (holder.attempt_id if holder else None) != self._attempt_id:
            change = "no longer has the record of this run, .safepoint/attempt.json"
            if holder is not None:
                change = f"was claimed by attempt {holder.attempt} of run {holder.run_id[:8]} on {holder.host}"
            raise ConflictError(
                f"{self.store.location} {change}; this run writes nothing more there",
                hint="files that are not uploaded stay in the local folder",
            )

    def _read_claim(self, deadline_s: float | None) -> tuple[Claim | None, str | None]:
        data, found = self._read(ATTEMPT_KEY, _MAX_ATTEMPT_BYTES, deadline_s)
        version = None if found is None else found.version
        try:
            return Claim(**parse_object(data)), version
        except (ValueError, TypeError):
            return None, version

    def _read(self, key: str, max_bytes: int, deadline_s: float | None) -> tuple[bytes, StoredObject | None]:
        """The first bytes of an object, at most `max_bytes`, and its properties; (b"", None) if it does not exist."""
        try:
            found = self.store.stat(key, deadline_s=deadline_s)
            length = min(found.size_bytes, max_bytes)
            return bytes(self.store.read(key, length=length, deadline_s=deadline_s)), found
        except ObjectNotFoundError:
            return b"", None

    # ---- writing and deleting -------------------------------------------------------------------------------

    def mark(
        self,
        name: str,
        files: Mapping[str, int],
        *,
        existing: Collection[str] = (),
        deadline_s: float | None = None,
    ) -> None:
        """Add files to the mark of `name`: the list of the files that Safepoint has begun to write or delete.

        Args:
            name: the name of a checkpoint or model.
            files: path → size in bytes of the files that are going to be written.
            existing: the paths of files that Safepoint has written before, and may delete.
            deadline_s: when to give up, by the monotonic clock. If None, only each single request has a time limit.

        Raises:
            ConflictError: another attempt has claimed the location.
            ConditionError: other nodes have changed the mark during each of several tries.
        """
        for num_left in reversed(range(_NUM_TRIES)):
            present, condition = self._read_mark(name, deadline_s)
            found = self._objects(name, deadline_s) if existing or condition != ABSENT else {}
            merged = present.extended(files, found, existing)
            self.fence(deadline_s=deadline_s)
            if condition != ABSENT and merged.sizes == present.sizes and not existing:
                return
            try:
                data = json.dumps(merged.fields()).encode()
                self.store.write(f"{UNFINISHED}/{name}", data, condition=condition, deadline_s=deadline_s)
            except ConditionError:  # another node of this run has written the mark
                if not num_left:
                    raise
            else:
                return

    def sweep(
        self,
        names: Collection[str] | None = None,
        *,
        only: Callable[[str], bool] = lambda path: True,
        begun_before_s: float | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """Abort the unfinished uploads of files that a mark or a manifest lists. Uploads of other tools stay.

        Args:
            names: the names of checkpoints and models; None for all.
            only: called with the path of each file; uploads of the files for which it returns True are aborted.
            begun_before_s: see `Store.sweep`.
            deadline_s: when to give up, by the monotonic clock. If None, see `Store.sweep` and `within_time`.

        Returns:
            The number of aborted uploads.
        """
        marked = self.unfinished(deadline_s=deadline_s) if names is None else names
        listed = ListedFiles()
        for name in within_time(marked):
            listed.add(name, {})  # this entry stays empty if the store refuses the mark
            with contextlib.suppress(UnreadableError), self.refusals.as_fault(f"{UNFINISHED}/{name}"):
                listed.add(name, self.marked_files(name, deadline_s=deadline_s))

        def is_ours(key: str) -> bool:
            name, _, path = key.partition("/")
            if not is_name(name) or (names is not None and name not in names) or not only(path):
                return False
            if name not in listed:
                listed.add(name, {})
                with contextlib.suppress(UnreadableError), self.refusals.as_fault(f"{name}/{MANIFEST_NAME}"):
                    listed.add(name, self.files_of_manifest(name, deadline_s))
            return path in listed[name]

        keys = listed.larger_than(WHOLE_BYTES)
        below = next(iter(listed)) if names is not None and len(listed) == 1 else ""
        sweep = self.store.sweep
        return sweep(only=is_ours, keys=keys, below=below, begun_before_s=begun_before_s, deadline_s=deadline_s)

    def files_of_manifest(self, name: str, deadline_s: float | None) -> dict[str, int]:
        """The files that a valid manifest of `name` lists, and the manifest itself; empty if there is none."""
        # A refusal is an error here: without the manifest, it is unknown which files may be deleted.
        with contextlib.suppress(ManifestError):
            manifest = Manifest.from_bytes(self.bytes_of_manifest(name, deadline_s=deadline_s) or b"")
            return {entry.path: entry.size_bytes for entry in manifest.files} | {MANIFEST_NAME: 0}
        return {}

    def clean(self, *, keep: Collection[str], deadline_s: float | None = None) -> int:
        """Delete the objects that ended attempts left unfinished. Call this after `claim`.

        Objects that the store does not let this run read or delete stay, with a warning.

        Args:
            keep: names of checkpoints that this attempt has in its folder and is going to upload.
            deadline_s: when to give up, by the monotonic clock. If None, see `Store.sweep` and `within_time`.

        Returns:
            The number of deleted objects and uploads.
        """
        num_deleted = self.sweep(self.unfinished(deadline_s=deadline_s) - set(keep), deadline_s=deadline_s)
        leftovers = (self.unfinished(deadline_s=deadline_s) | self.with_parts(deadline_s)) - set(keep)
        for name in within_time(sorted(leftovers)):
            try:
                with self.refusals.as_fault(f"{name}/{MANIFEST_NAME}", deadline_s=deadline_s):
                    but = self.files_of_manifest(name, deadline_s)
                    is_newer_format = not but and self.is_newer_format(name, deadline_s=deadline_s)
                if not is_newer_format:
                    num_deleted += self.delete_marked(name, but=but, deadline_s=deadline_s)
            except (AccessDeniedError, UnreadableError) as error:
                # No reader uses these objects: the checkpoint has no manifest, or its manifest does not list them.
                _log.warning(
                    "objects that an earlier attempt left unfinished in %s stay in the store, because the store does "
                    "not let you read or delete them: %s",
                    name,
                    error,
                )
        for item in list(self.store.list(".safepoint", deadline_s=deadline_s)):
            if is_probe(item.key) and clock.wall_s() - item.modified_s > _PROBE_LIVES_S:
                self.store.delete(item.key, deadline_s=deadline_s)
                num_deleted += 1
        return num_deleted

    def with_parts(self, deadline_s: float | None) -> set[str]:
        """The names of the checkpoints for which a node has begun to upload its part."""
        keys = [item.key.removeprefix(f"{PARTS}/") for item in self.store.list(PARTS, deadline_s=deadline_s)]
        return {name for key in keys if is_name(name := key.partition("/")[0])}

    def delete_marked(
        self,
        name: str,
        *,
        own: Collection[str] = (),
        but: Collection[str] = (),
        keep_mark: bool = False,
        deadline_s: float | None = None,
    ) -> int:
        """Delete the leftovers that the mark of `name` lists (see `Mark`), and then the mark. Other files stay.

        Args:
            name: the name of a checkpoint or model.
            own: paths of files to delete in any case, because Safepoint has written them.
            but: paths of files to keep: the files of the committed checkpoint. If `but` is empty, the mark is deleted
                only when no file is left below `name`.
            keep_mark: whether to keep the mark.
            deadline_s: when to give up, by the monotonic clock. If None, only each single request has a time limit.

        Returns:
            The number of deleted files.

        Raises:
            ConflictError: another attempt has claimed the location.
        """
        # The objects are listed before `fence`, so that none of them can be an object of a later attempt.
        found = {path: item for path, item in self._objects(name, deadline_s).items() if path not in but}
        mark = self._read_mark(name, deadline_s)[0]
        doomed = {path for path, item in found.items() if path in own or mark.names(path, item)}
        for path in sorted((found.keys() & mark.sizes.keys()) - doomed)[:1]:
            _log.warning(
                "%s/%s, and other objects like it, stay in %s: a mark of an unfinished save names them, but the "
                "mark is newer than these objects, or states other sizes. Delete them if they are of no use",
                name,
                printable(path),
                self.store.location,
            )
        self.fence(deadline_s=deadline_s)
        for path in sorted(doomed):
            self.store.delete(f"{name}/{path}", deadline_s=deadline_s)
        # The files are listed again. If another node has just written some, the mark stays for the next start.
        if not keep_mark and (but or not self.files_of(name, deadline_s=deadline_s)):
            self.forget(name, deadline_s)
        return len(doomed)

    def forget(self, name: str, deadline_s: float | None) -> None:
        """Delete the marks of a checkpoint that was committed or deleted."""
        for item in list(self.store.list(f"{PARTS}/{name}", deadline_s=deadline_s)):
            self.store.delete(item.key, deadline_s=deadline_s)
        self.store.delete(f"{UNFINISHED}/{name}", deadline_s=deadline_s)

    def note_commit(self, step: int) -> None:
        """Record that this attempt has committed `step`. Drop the facts of an earlier checkpoint of this step."""
        self._committed.add(step)
        self._candidates.pop(step, None)
        self._passed_over.discard(step)

    def delete(self, name: str, *, deadline_s: float | None = None) -> bool:
        """Delete the checkpoint called `name`, such as `checkpoint-20`, its manifest first.

        Returns:
            False if a later release wrote the checkpoint, which then stays.

        Raises:
            ConflictError: another attempt has claimed the location.
        """
        if self.is_newer_format(name, deadline_s=deadline_s):
            return False
        written = self._written_files(name, deadline_s).keys()
        self.mark(name, {}, existing=written, deadline_s=deadline_s)
        self.store.delete(f"{name}/{MANIFEST_NAME}", deadline_s=deadline_s)
        self.delete_marked(name, own=written, deadline_s=deadline_s)
        return True

    def _written_files(self, name: str, deadline_s: float | None) -> Mapping[str, int]:
        """The files that the manifest of `name` lists; all files if it is invalid; empty if there is no manifest."""
        files = self.files_of_manifest(name, deadline_s)
        found = {} if files else self.files_of(name, deadline_s=deadline_s)
        return found if MANIFEST_NAME in found else files

    def where(self, name: str) -> str:
        """The checkpoint's location."""
        return str(self.store.location.child(name))
