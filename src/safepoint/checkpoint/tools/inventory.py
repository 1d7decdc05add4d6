"""Lists, verifies and deletes the checkpoints in a folder or an object store, for commands.

Promises: listing changes nothing. A hostile name or manifest is reported and never used as a path. A checkpoint is
complete if all files of its manifest exist and have the sizes that the manifest states; only `verify` also compares
their contents. Only one manifest is in memory at a time: an item keeps a few facts of its manifest, and a limited
number of faults.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from safepoint.checkpoint.foreign.examine import examine
from safepoint.checkpoint.format.catalog import checkpoint_name, step_of
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, PART_NAME, Manifest, Trigger
from safepoint.checkpoint.format.verify import (
    Fault,
    Verdict,
    compare_listing,
    is_newer_format,
    read_manifest_of_any,
    read_part,
    verify,
    verify_part,
)
from safepoint.checkpoint.local.final_model import FINAL, final_folder
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import Candidate, Policy, select_superseded
from safepoint.checkpoint.remote.fetch import check, windows_of
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.errors import (
    CheckpointError,
    FolderNotFoundError,
    ManifestError,
    NotFoundError,
    NothingValidError,
    SafepointError,
    UnreadableError,
)
from safepoint.foundation import clock
from safepoint.foundation.shared_folders.ownership import is_of_stranger
from safepoint.foundation.units import ByteCounter
from safepoint.storage.location import Location, parse_location, resolve_claim
from safepoint.storage.opening import open_store
from safepoint.storage.store import Store, StoredObject

_ANSWER_WITHIN_S = 20.0
_FINAL_IN_FOLDER = final_folder(OutputFolder(Path())).as_posix()
"""Where a run keeps the final model until it is uploaded."""


_MAX_FAULTS = 1000
"""An item keeps at most this many faults, and the number of the others. A manifest of 64 MiB can name half a million
missing files."""
_MAX_NAME_CHARS = 1 << 16
"""The metrics of a checkpoint are ignored if their names together have more characters than this."""


class Kind(StrEnum):
    """The kinds of folders and prefixes that have the name of a checkpoint."""

    CHECKPOINT = "checkpoint"
    """The folder or prefix has a manifest."""
    UNFINISHED = "unfinished"
    """The folder or prefix has no manifest, and Safepoint has begun to write or to delete it."""
    FOREIGN = "foreign"
    """The folder or prefix has no manifest, and Safepoint has not written it. Another tool may have written it. Only
    `safepoint checkpoints adopt` writes into it."""
    PART = "part"
    """One node's part of a checkpoint whose other parts are in the folders of the other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What a manifest states about a checkpoint, without its files; see `Manifest`. A `world_size` or a
    `gradient_accumulation` of 0 means that the value is not known."""

    run_id: str
    step: int
    trigger: Trigger
    created: str
    metrics: Mapping[str, float]
    world_size: int = 0
    gradient_accumulation: int = 0

    @classmethod
    def by(cls, manifest: Manifest) -> "Stated":
        """The facts of a manifest, without metrics whose names are far too long. A `created` that is far too long is
        cut."""
        is_short = sum(map(len, manifest.metrics)) <= _MAX_NAME_CHARS
        return cls(
            run_id=manifest.run_id,
            step=manifest.step,
            trigger=manifest.trigger,
            created=manifest.created[:_MAX_NAME_CHARS],
            metrics=manifest.metrics if is_short else {},
            world_size=manifest.world_size,
            gradient_accumulation=manifest.gradient_accumulation,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A folder or prefix that is named like a checkpoint.

    Args:
        name: `checkpoint-<step>` or `final`.
        prefix: its key in the store.
        where: its location, for messages.
        stated: what its manifest states; None when it cannot be read.
        faults: what is wrong with it; contents are not compared. If there are many faults: only the first ones, and
            the number of the others.
        kind: what it is, such as a checkpoint or a node's part of one.
        num_files: the number of files, without the manifest.
        size_bytes: the size of these files.
        modified_s: when something in it was last written, seconds since 1970.
        created_s: the time of the save, as its manifest states it, seconds since 1970; `modified_s` if there is no
            manifest, or no valid time in the manifest.
        strays: paths that the manifest does not name. They do not count as faults.
        is_newer_format: whether a later release wrote it; then it is not deleted.
        is_of_other_user: whether another user has made it, in a folder with the sticky bit to which others may write.
    """

    name: str
    prefix: str
    where: str
    stated: Stated | None
    faults: tuple[Fault, ...]
    kind: Kind
    num_files: int
    size_bytes: int
    modified_s: float
    created_s: float
    strays: tuple[str, ...] = ()
    is_newer_format: bool = False
    is_of_other_user: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all files of the manifest exist and have the sizes in it."""
        return self.kind is Kind.CHECKPOINT and self.stated is not None and not self.faults

    @property
    def counts(self) -> bool:
        """Whether a command may choose it when the user names no checkpoint. It must be complete, and must not belong
        to another user. Runs have the same rule."""
        return self.is_complete and not self.is_of_other_user


class Inventory:
    """The checkpoints at one location.

    Args:
        store: the store at the location.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._remote = RemoteFolder(store)
        location = store.location
        self.folder = location.folder if location.is_folder else None
        """The folder of the location; None for an object store."""

    def items(self) -> list[Item]:
        """All items, newest first, the final model last.

        Raises:
            FolderNotFoundError: the folder does not exist.
            StorageError: the location cannot be read.
        """
        if self.folder is not None and not self.folder.is_dir():
            raise FolderNotFoundError(self.folder)
        found: dict[str, list[StoredObject]] = {}
        for item in self.store.list():
            top = item.key.partition("/")[0]
            prefix = _FINAL_IN_FOLDER if item.key.startswith(f"{_FINAL_IN_FOLDER}/") else top
            if prefix == _FINAL_IN_FOLDER or "/" in item.key:
                found.setdefault(prefix, []).append(item)
        steps = sorted((step for prefix in found if (step := step_of(Path(prefix))) is not None), reverse=True)
        prefixes = [checkpoint_name(step) for step in steps]
        # Only an object store has unfinished checkpoints. Under an output folder, uncommitted files are in
        # `.safepoint/work`.
        unfinished = self._remote.unfinished() if self.folder is None else set[str]()
        for prefix in (FINAL, _FINAL_IN_FOLDER):
            # A `final/` that a script has saved has no manifest, and is not listed.
            is_ours = any(item.key == f"{prefix}/{MANIFEST_NAME}" for item in found.get(prefix, []))
            if is_ours or (prefix in unfinished and prefix in found):
                prefixes.append(prefix)
        passed_over = {path.name for path in OutputFolder(self.folder).passed_over()} if self.folder else set[str]()
        return [
            self._item(
                prefix,
                found[prefix],
                is_unfinished=prefix in unfinished,
                is_passed_over=prefix in passed_over,
            )
            for prefix in prefixes
        ]

    def item(self, name: str | None = None) -> Item:
        """The item called `name`; if `name` is None, the newest complete checkpoint that counts.

        Raises:
            NotFoundError: there is no item called `name`.
            NothingValidError: no checkpoint is complete.
        """
        where = self.store.location
        if name is None:
            found = [item for item in self.items() if item.counts and item.name != FINAL]
            missing: SafepointError = NothingValidError(f"{where} holds no complete checkpoint")
        else:
            found = [item for item in self.items() if item.name == name]
            missing = NotFoundError(
                f"there is no {name} in {where}", hint="`safepoint checkpoints list` lists the checkpoints"
            )
        if not found:
            raise missing
        return found[0]

    def read_manifest(self, item: Item) -> Manifest:
        """The manifest of an item; for a part, the manifest of the whole checkpoint.

        Raises:
            ManifestError: there is no valid manifest any more.
            UnreadableError: the manifest cannot be read, but other objects in the store can be read.
        """
        if self.folder is None:
            return self._remote.manifest_of(item.prefix)
        return read_manifest_of_any(self.folder / item.prefix)

    def complete_manifest(self, item: Item) -> Manifest:
        """The manifest of a complete checkpoint.

        Raises:
            CheckpointError: the checkpoint is not complete, or was replaced since it was listed.
        """
        if item.kind is Kind.PART:
            raise CheckpointError(
                f"{item.where} is only one node's part of a checkpoint; nothing was read",
                hint="the complete checkpoint is in the run's object store, and on every node that resumed from it",
            )
        if item.stated is None or item.faults:
            raise CheckpointError(
                f"{item.where} is not a complete checkpoint: {item.faults[0]}; nothing was read",
                hint="`safepoint checkpoints verify` lists the faults",
            )
        manifest = self.read_manifest(item)
        if Stated.by(manifest) != item.stated:
            raise CheckpointError(f"{item.where} was replaced while it was read", hint="run the command again")
        return manifest

    def _item(
        self, prefix: str, objects: Sequence[StoredObject], *, is_unfinished: bool, is_passed_over: bool
    ) -> Item:
        contents = {item.key.removeprefix(f"{prefix}/"): item.size_bytes for item in objects}
        kind = Kind.CHECKPOINT
        if contents.pop(MANIFEST_NAME, None) is None:
            is_part = contents.pop(PART_NAME, None) is not None and self.folder is not None
            kind = Kind.PART if is_part else Kind.UNFINISHED if is_unfinished else Kind.FOREIGN
        verdict = self._compare(prefix, kind, contents)
        manifest, faults = verdict.manifest, verdict.faults
        name = FINAL if prefix == _FINAL_IN_FOLDER else prefix
        if manifest is not None and step_of(Path(name)) not in {None, manifest.step}:
            faults = (Fault(file=MANIFEST_NAME, reason=f"its step is {manifest.step}"), *faults)
        if is_passed_over:
            reason = "the run did not use it, and could not move it aside: move it away, or use --drop-damaged"
            faults = (Fault(file="the folder", reason=reason), *faults)
        modified_s = max(item.modified_s for item in objects)
        created_s = Candidate.of(manifest, ()).created_s if manifest is not None else modified_s
        return Item(
            name=name,
            prefix=prefix,
            where=str(self.store.location.child(prefix)),
            stated=Stated.by(manifest) if manifest is not None else None,
            faults=_first(faults),
            kind=kind,
            num_files=len(contents),
            size_bytes=sum(contents.values()),
            modified_s=modified_s,
            created_s=created_s if 0 <= created_s < float("inf") else modified_s,
            strays=verdict.strays,
            is_newer_format=manifest is None and self._is_newer_format(prefix),
            is_of_other_user=self.folder is not None and is_of_stranger(self.folder / prefix.partition("/")[0]),
        )

    def _is_newer_format(self, prefix: str) -> bool:
        if self.folder is not None:
            return is_newer_format(self.folder / prefix)
        # If the store refuses the manifest, the release that wrote it is unknown. Then `delete` fails for the same
        # reason.
        with contextlib.suppress(UnreadableError), self._remote.refusals.as_fault(f"{prefix}/{MANIFEST_NAME}"):
            return self._remote.is_newer_format(prefix)
        return False

    def _compare(
        self,
        prefix: str,
        kind: Kind,
        contents: Mapping[str, int],
        *,
        deep: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Verdict:
        """Compare a checkpoint or part with its manifest or record. With `deep`, also read the files of a folder."""
        try:
            if self.folder is None:
                manifest = self._remote.manifest_of(prefix)
                strays = sorted(contents.keys() - {entry.path for entry in manifest.files})
                faults = tuple(compare_listing(manifest.files, contents))
                return Verdict(manifest=manifest, faults=faults, strays=tuple(strays))
            if kind is Kind.PART:
                part = read_part(self.folder / prefix)
                faults = verify_part(self.folder / prefix, part, deep=deep, progress=progress)
                return Verdict(manifest=part.manifest, faults=faults)
        except (ManifestError, UnreadableError) as error:
            fault = Fault(file=PART_NAME if kind is Kind.PART else MANIFEST_NAME, reason=str(error))
            return Verdict(manifest=None, faults=(fault,))
        # Unlike a listing, this finds links and special files too.
        return verify(self.folder / prefix, deep=deep, progress=progress)

    def verify(self, item: Item, *, progress: Callable[[int, int], None] | None = None) -> tuple[Fault, ...]:
        """All faults of an item. Its files are read, so that faults in their contents are found too.

        A foreign checkpoint is checked as far as its format allows.

        Args:
            item: a checkpoint or a model of this inventory.
            progress: receives the bytes read so far, and the bytes in all.
        """
        if item.kind is Kind.FOREIGN:
            return examine(self.store, item.prefix).faults
        if self.folder is not None:
            faults = _first(self._compare(item.prefix, item.kind, {}, deep=True, progress=progress).faults)
            known = set(faults)
            return _first((*[fault for fault in item.faults if fault not in known], *faults))
        if item.stated is None:
            return item.faults
        found = self.store.list(item.prefix)
        contents = {one.key.removeprefix(f"{item.prefix}/"): one.size_bytes for one in found}
        try:
            manifest = self.read_manifest(item)
        except (ManifestError, UnreadableError) as error:
            # The checkpoint was deleted or replaced since it was listed.
            return _first((*item.faults, Fault(file=MANIFEST_NAME, reason=str(error))))
        missing = {fault.file for fault in compare_listing(manifest.files, contents)}
        parts = [part for part in windows_of(manifest.files) if part.path not in missing]
        counter = ByteCounter(progress, sum(part.size_bytes for part in parts))
        wrong = check(self.store, item.prefix, parts, progress=counter.add)
        return _first((*item.faults, *(Fault(file=path, reason=reason) for path, reason in sorted(wrong.items()))))

    # ---- deleting -------------------------------------------------------------------------------------------

    def superseded(
        self,
        policies: Sequence[Policy],
        *,
        progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    ) -> list[Item]:
        """The checkpoints that no policy keeps, oldest first; see `select_superseded`. Parts always stay.

        A checkpoint is deleted only if a valid checkpoint stays. So, before a deletion, all files of the newest
        complete checkpoint are read. If it is damaged, the files of the next older checkpoint are read, and so on.
        """
        by_step = {
            item.stated.step: item
            for item in self.items()
            if item.kind is Kind.CHECKPOINT
            and item.stated is not None
            and item.name == checkpoint_name(item.stated.step)
            and not item.is_of_other_user
        }
        candidates = [
            replace(Candidate.of(item.stated), is_valid=item.is_complete, is_in_use=self.is_in_use(item))
            for item in by_step.values()
            if item.stated is not None
        ]

        def is_good(step: int) -> bool:
            item = by_step[step]
            return not self.verify(item, progress=lambda done, total: progress(item.name, done, total))

        steps = select_superseded(candidates, policies, now_s=clock.wall_s(), is_good=is_good)
        return [by_step[step] for step in steps]

    def is_in_use(self, item: Item) -> bool:
        """Whether a process reads or uploads the item. False for an object store, where this is not known."""
        return self.folder is not None and OutputFolder(self.folder).is_in_use(item.prefix)

    def delete(self, item: Item) -> bool:
        """Delete an item; readers see it completely or not at all.

        Returns:
            False if the item stays, because a process is reading it, or because a later release wrote it.

        Raises:
            ConflictError: a run has begun to use the object store meanwhile.
        """
        if self.folder is None:
            return RemoteFolder.as_guest(self.store).delete(item.prefix)
        output = OutputFolder(self.folder)
        output.create()
        return output.delete(item.prefix)


def _first(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """The faults, or the first of them and the number of the others."""
    num_left = len(faults) - _MAX_FAULTS
    if num_left <= 0:
        return faults
    others = Fault(file=".", reason=f"there are {num_left} more faults")
    return (*(fault for fault in faults[:_MAX_FAULTS] if fault != others), others)


def open_inventory(text: str) -> tuple[Inventory, str | None]:
    """Open the location that an argument names: an output location, or one checkpoint in it.

    Args:
        text: the argument.

    Returns:
        The inventory of the output location; and the name of the checkpoint, or None if `text` names none.

    Raises:
        ValueError: the argument is not a valid location.
        StorageError: the store does not answer.
    """
    location = resolve_claim(parse_location(text))
    is_checkpoint = step_of(Path(location.name)) is not None
    is_final = location.name == FINAL and (location.is_remote or (location.folder / MANIFEST_NAME).is_file())
    if not is_checkpoint and not is_final:
        return Inventory(_reachable(location)), None
    return Inventory(_reachable(location.parent)), location.name


def _reachable(location: Location) -> Store:
    """Open the store at `location`, and send a first request with a short deadline, because a person is waiting."""
    store = open_store(location)
    if location.is_remote:
        next(iter(store.list(deadline_s=clock.monotonic_s() + _ANSWER_WITHIN_S)), None)
    return store
