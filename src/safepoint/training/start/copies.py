"""Copies of one checkpoint on several nodes: which of its files each output folder has (docs/adr/0008).

This module also has the class for the checkpoint to resume from, and a lock (a lease) that protects this checkpoint
while it is read.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.format.catalog import fault_of_step, step_of
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, PART_NAME, FileEntry, Manifest
from safepoint.checkpoint.format.verify import Fault, compare_content, read_part, verify, verify_part
from safepoint.errors import CheckpointError, ManifestError, printable
from safepoint.foundation.events.console import ProgressLine
from safepoint.foundation.shared_folders.leases import reading

_log = logging.getLogger("safepoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a checkpoint of another program comes from.

    Args:
        where: the path or URI of the checkpoint.
        writer: the program that wrote the checkpoint, for messages.
        is_batch_known: whether the checkpoint states how many samples a step had. If not, this run's number is used.
    """

    where: str
    writer: str
    is_batch_known: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A verified checkpoint to resume from; or a snapshot in memory, which may not be durable.

    Args:
        path: the folder to load.
        manifest: the checkpoint's manifest.
        is_durable: False for a snapshot that is only in memory.
        foreign: the origin of the checkpoint, if another program wrote it; None if Safepoint wrote it. If there is an
            origin, `path` is a copy that is deleted after loading.
    """

    path: Path
    manifest: Manifest
    is_durable: bool = True
    foreign: Origin | None = None


Examine = Callable[[ResumePoint], str]
"""Says why the ranks cannot continue together from a complete checkpoint; empty if they can. All ranks call it before
any rank loads the checkpoint, and it returns the same on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCopy:
    """A copy whose files were compared with its own manifest by name and size. The files were not read.

    Args:
        path: the path of the copy.
        manifest: the copy's manifest; None when the manifest cannot be read or belongs to another step.
        files: the files of the manifest that the copy has with the right size.
        is_part: whether the copy is only one node's part: the files that the node's own folder holds.
        fault: the first fault that was found; None if there is none.
        strays: paths of files that the manifest does not list; a framework might load them.
    """

    path: Path
    manifest: Manifest | None = None
    files: frozenset[FileEntry] = frozenset()
    is_part: bool = False
    fault: Fault | None = None
    strays: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedCopy:
    """A copy whose files were read and compared with the manifest of the checkpoint to resume from.

    Args:
        path: the path of the copy.
        good: the paths of the files with the right content.
        is_complete: whether the copy is the whole checkpoint.
        is_replaceable: whether the whole checkpoint may replace the copy. If not, an incomplete copy is set aside.
        fault: what is wrong with the first damaged file; None if no file is damaged.
    """

    path: Path
    good: frozenset[str] = frozenset()
    is_complete: bool = False
    is_replaceable: bool = True
    fault: Fault | None = None


def list_copy(folder: Path) -> ListedCopy | None:
    """Compare the names and sizes of the files in `folder` with its manifest; None if there is no such folder."""
    if not os.path.lexists(folder):
        return None
    # Do not use `Path.exists` here: it raises an error if the folder is unreadable.
    has_manifest, has_part = (os.path.exists(folder / name) for name in (MANIFEST_NAME, PART_NAME))
    is_part = not folder.is_symlink() and has_part and not has_manifest
    strays: tuple[str, ...] = ()
    if is_part:
        try:
            part = read_part(folder)
        except ManifestError as error:
            return ListedCopy(path=folder, fault=Fault(file=PART_NAME, reason=str(error)))
        manifest, entries, faults = part.manifest, part.files, verify_part(folder, part, deep=False)
    else:
        verdict = verify(folder, deep=False)
        manifest, faults, strays = verdict.manifest, verdict.faults, verdict.strays
        entries = manifest.files if manifest is not None else ()
    if manifest is not None and (fault := fault_of_step(manifest, folder)):
        return ListedCopy(path=folder, fault=fault)
    damaged = {fault.file for fault in faults}
    if not damaged <= {entry.path for entry in entries}:
        entries = ()  # a fault outside of the listed files makes the whole copy unusable
    return ListedCopy(
        path=folder,
        manifest=manifest,
        files=frozenset(entry for entry in entries if entry.path not in damaged),
        is_part=is_part,
        fault=faults[0] if faults else None,
        strays=strays,
    )


def verify_copy(folder: Path, manifest: Manifest, progress: Callable[[int, int], None] | None) -> VerifiedCopy:
    """Read and verify the files in `folder` that belong to the checkpoint of `manifest`.

    Args:
        folder: the folder with the checkpoint's name. It may be missing.
        manifest: the checkpoint's manifest.
        progress: called with bytes read so far and bytes in all.
    """
    copy = list_copy(folder)
    if copy is None:
        return VerifiedCopy(path=folder)
    warn_of_strays(copy)
    entries = [entry for entry in manifest.files if entry in copy.files]
    faults = compare_content(folder, entries, progress)
    is_same_run = copy.manifest is not None and copy.manifest.run_id == manifest.run_id
    return VerifiedCopy(
        path=folder,
        good=frozenset(entry.path for entry in entries) - {fault.file for fault in faults},
        is_complete=copy.manifest == manifest
        and not (copy.is_part or copy.strays or copy.fault is not None or faults),
        is_replaceable=copy.is_part and is_same_run,
        fault=faults[0] if faults else None,
    )


def warn_of_strays(copy: ListedCopy) -> None:
    """Warn if the copy has files that its manifest does not name."""
    if copy.strays:
        name = printable(copy.strays[0])
        _log.warning("%s has files that its manifest does not name, such as %s; they are not loaded", copy.path, name)


def named_manifest(path: Path, progress: Callable[[int, int], None] | None) -> Manifest:
    """Verify the checkpoint that the user named, and return its manifest.

    Args:
        path: the path of the checkpoint.
        progress: called with bytes read so far and bytes in all.

    Raises:
        CheckpointError: the checkpoint is not valid.
    """
    verdict = verify(path, progress=progress)
    if verdict.manifest is None or not verdict.is_valid:
        raise CheckpointError(
            f"--resume {path} is not a valid checkpoint: {verdict.faults[0]}; training was not started",
            hint="name another checkpoint, or omit --resume to resume from the newest valid one",
        )
    if step_of(path) not in {None, verdict.manifest.step}:
        raise CheckpointError(
            f"--resume {path} is not a valid checkpoint: its manifest says step {verdict.manifest.step}, "
            f"the folder's name says {step_of(path)}; training was not started",
            hint="rename the folder to match its manifest, or name another checkpoint",
        )
    return verdict.manifest


def verify_best(path: Path) -> None:
    """Verify the checkpoint with the best model, which a framework is about to load. If it was deleted, do nothing.

    Raises:
        CheckpointError: the checkpoint is not valid.
    """
    if os.path.lexists(path):
        verdict = verify(path, progress=ProgressLine("verifying").update)
        strays = [f"{printable(stray)}: it is not in the manifest" for stray in verdict.strays]
        if not verdict.is_valid or strays:
            raise CheckpointError(
                f"the best checkpoint {path} is not valid: {[*verdict.faults, *strays][0]}; its model was not loaded",
                hint="move it away and run the same command again; training then ends with the last step's model",
            )


@contextlib.contextmanager
def lease(point: ResumePoint | None) -> Generator[None]:
    """While the block runs, protect the checkpoint of `point` from pruning. If `point` is None, do nothing."""
    if point is None:
        yield
        return
    with reading(point.path / MANIFEST_NAME):
        yield
