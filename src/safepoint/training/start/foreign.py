"""Finds the checkpoints that other programs wrote, and composes manifests for them (docs/adr/0023).

A checkpoint in the first rank's folder or in the object store can be used. A checkpoint that is only in the folder of
another node cannot be used, because there is no record of the files that each node has. All ranks call the methods
together.
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from safepoint.checkpoint.foreign.describe import describe
from safepoint.checkpoint.foreign.examine import Examination, examine, faults_of_names, is_foreign
from safepoint.checkpoint.format.catalog import checkpoint_name, step_of
from safepoint.checkpoint.format.manifest import Manifest
from safepoint.checkpoint.format.verify import Fault
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.pickles.module_states import names_of_script
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.errors import CheckpointError, NothingValidError, SafepointError
from safepoint.foundation.events.console import ProgressLine
from safepoint.foundation.files import delete_tree
from safepoint.foundation.units import plural
from safepoint.storage.location import Location, Scheme, parse_location
from safepoint.storage.opening import open_store
from safepoint.storage.store import Store
from safepoint.training.collective.collective_wait import long_on_all_ranks, on_all_ranks, on_first_rank
from safepoint.training.collective.peers import Peers
from safepoint.training.start.candidate import Candidate
from safepoint.training.start.copies import Origin, verify_best
from safepoint.training.start.folders import Folders


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCheckpoint:
    """An examined checkpoint of another program, with the digests of its files.

    Args:
        manifest: a manifest that was composed from the checkpoint's files.
        origin: where the checkpoint is, and which program wrote it.
        folder: the checkpoint's folder on the first rank; None if the checkpoint is in the object store.
    """

    manifest: Manifest
    origin: Origin
    folder: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a checkpoint of another program is.

    Args:
        step: the step in the checkpoint's name.
        folder: the folder that contains the checkpoint; None for the object store.
        rank: the rank that sees the folder.
    """

    step: int
    folder: Path | None
    rank: int = 0


class ForeignCheckpoints:
    """The checkpoints of other programs that a start of a run can find.

    Args:
        peers: all ranks.
        output: the output folder of this rank.
        folders: which ranks use which folder.
        store: the object store, or None.
        reject: called on every rank with the path of a checkpoint that cannot be used, and the reason.
    """

    def __init__(
        self,
        peers: Peers,
        output: OutputFolder,
        folders: Folders,
        store: Store | None,
        reject: Callable[[object, Fault], None],
    ) -> None:
        self._peers = peers
        self._output = output
        self._folders = folders
        self._store = store
        self._reject = reject
        self.copies = output.work / "foreign"
        """Where the checkpoint that is being tried is copied to, on every node. The Trainer loads the copy, which has
        exactly the examined files."""

    def places(self) -> list[Place]:
        """Where these checkpoints are, newest first. No checkpoint is examined.

        Places with the same step are in this order: the first rank's folder, the store, folders of other ranks.
        """

        own = self._peers.place

        def find() -> list[Place]:
            found = self._output.checkpoints() if self._folders.is_owner else []
            steps = [step_of(path) or 0 for path in found if is_foreign(path)]
            places = [Place(step=step, folder=self._output.root, rank=own.rank) for step in steps]
            if own.is_first and self._store is not None:
                places += [Place(step=step, folder=None) for step in RemoteFolder(self._store).foreign_steps()]
            return places

        everywhere = [place for places in on_all_ranks(self._peers, find) for place in places]
        return sorted(everywhere, key=lambda place: -place.step)  # the sort is stable

    def usable(self) -> Iterator[ForeignCheckpoint]:
        """The usable checkpoints, newest first. Unusable checkpoints are passed to `reject`.

        A checkpoint is read when the iteration reaches it. All ranks iterate together.
        """
        for place in self.places():
            found = self.read(place)
            if isinstance(found, ForeignCheckpoint):
                yield found
            else:
                self._reject(self.where(place), found)

    def read(self, place: Place) -> ForeignCheckpoint | Fault:
        """Examine the checkpoint at `place`, and read all its files. Return a Fault if it cannot be resumed from."""

        if place.rank:
            return Fault(
                file=".", reason=f"it is in the folder of rank {place.rank}; the first rank cannot read this folder"
            )

        def read() -> ForeignCheckpoint | Fault | None:
            if not self._peers.place.is_first:
                return None
            try:
                store, found = self._examine(place)
                if found.faults:
                    return found.faults[0]
                manifest = describe(store, found, ProgressLine("reading").update)
            except CheckpointError as error:
                return Fault(file=".", reason=error.message)
            except SafepointError:
                raise
            except Exception as error:  # noqa: BLE001
                # An unforeseen error must not end the start, because an older checkpoint may be valid.
                return Fault(file=".", reason=f"it is damaged: {type(error).__name__}: {error}")
            origin = Origin(where=self.where(place), writer=found.writer, is_batch_known=found.is_batch_known)
            folder = None if place.folder is None else place.folder / found.name
            return ForeignCheckpoint(manifest=manifest, origin=origin, folder=folder)

        result = long_on_all_ranks(self._peers, read)[0]
        assert result is not None
        return result

    def candidate(self, found: ForeignCheckpoint) -> Candidate:
        """The candidate for a checkpoint, which is copied to `copies` from now on."""
        # The folder has a new name each time, because it may be impossible to delete an earlier folder.
        unique = on_first_rank(self._peers, lambda: uuid.uuid4().hex)
        self.copies = self._output.work / f"foreign-{unique}"
        return Candidate(
            manifest=found.manifest, is_in_store=found.folder is None, named=found.folder, foreign=found.origin
        )

    def delete_copy(self) -> None:
        """Delete the copy of a checkpoint that was rejected, on every node. The original stays."""

        def delete() -> None:
            if self._folders.is_owner:
                with contextlib.suppress(OSError):  # a copy that cannot be deleted stays, and is not used
                    delete_tree(self.copies)

        long_on_all_ranks(self._peers, delete)

    def fault_of(self, place: Place) -> str:
        """Why the checkpoint at `place` cannot be resumed from; empty if the names of its files show no fault.

        No file of the checkpoint is opened: the result is only for a message, and a start must not wait for a
        message.
        """

        def fault() -> str:
            if place.rank:
                return f"it is in the folder of rank {place.rank}; the first rank cannot read this folder"
            faults = faults_of_names(self._store_of(place), checkpoint_name(place.step))
            return str(faults[0]) if faults else ""

        return on_first_rank(self._peers, fault)

    def named(self, text: str) -> Place | None:
        """The place of the foreign checkpoint that `--resume` names; None if it names something else."""

        def find() -> Place | None:
            path = Path(text)
            if is_foreign(path):
                return Place(step=step_of(path) or 0, folder=path.parent)
            step = step_in(self._store.location, text) if self._store is not None else None
            if step is None or self._store is None or step not in RemoteFolder(self._store).foreign_steps():
                return None
            return Place(step=step, folder=None)

        return on_first_rank(self._peers, find)

    def refuse(self, places: Sequence[Place], *, can_resume: bool) -> NoReturn:
        """Refuse to start beside these checkpoints. Only the first rank calls this method.

        Args:
            places: where they are.
            can_resume: whether the training could resume from a checkpoint of another program.

        Raises:
            NothingValidError: always.
        """
        store = self._store if places[0].folder is None else None
        location = self._output.root if store is None else store.location
        what = f"{location} holds {plural(len(places), 'checkpoint')} that Safepoint did not write"
        if not can_resume:
            raise NothingValidError(
                f"{what}. Only the Trainer of Transformers can resume from such a checkpoint; training was not "
                "started",
                hint="name another output folder; to start at step 0 in this folder, use --from-scratch, which moves "
                "the checkpoints aside and deletes nothing",
            )
        raise NothingValidError(
            f"{what}, and no checkpoint from which a run can resume; training was not started",
            hint="`safepoint checkpoints verify LOCATION/checkpoint-N` lists what is wrong; to start at step 0, name "
            "another location; for a folder, --from-scratch also works: it moves the checkpoints aside and deletes "
            "nothing",
        )

    def where(self, place: Place) -> str:
        """The path or URI of the checkpoint at `place`, for messages."""
        name = checkpoint_name(place.step)
        if place.folder is not None:
            return str(place.folder / name)
        return str(self._store.location.child(name)) if self._store is not None else name

    def _store_of(self, place: Place) -> Store:
        store = self._store if place.folder is None else open_store(_location_of(place.folder))
        assert store is not None
        return store

    def _examine(self, place: Place) -> tuple[Store, Examination]:
        store = self._store_of(place)
        return store, examine(store, checkpoint_name(place.step), allowed=names_of_script())


def check_best(path: Path) -> None:
    """Verify the checkpoint with the best model, which a framework is about to load. If it was deleted, do nothing.

    Raises:
        CheckpointError: the checkpoint is not valid.
    """
    if not is_foreign(path):
        verify_best(path)
        return
    found = examine(open_store(_location_of(path.parent)), path.name, allowed=names_of_script())
    if found.faults:
        raise CheckpointError(
            f"the best checkpoint {path} is not valid: {found.faults[0]}; its model was not loaded",
            hint="move it away and run the same command again; training then ends with the last step's model",
        )


def step_in(location: Location, text: str) -> int | None:
    """The step of the checkpoint at `location` with the URI `text`; None if `text` is not such a URI."""
    try:
        named = parse_location(text)
    except ValueError:
        return None
    return step_of(Path(named.name)) if named.is_remote and named.parent == location else None


def _location_of(folder: Path) -> Location:
    return Location(scheme=Scheme.FILE, path=str(folder.absolute()))
