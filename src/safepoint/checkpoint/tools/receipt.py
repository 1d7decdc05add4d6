"""Checks the checkpoint of a given step, and returns the result for the receipt of a suspension.

The receipt states which checkpoint a suspension has saved, and what was checked in it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import Manifest
from safepoint.checkpoint.format.verify import Fault, compare_listing, verify
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.errors import CheckpointError, ManifestError, UnreadableError
from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReceipt:
    """A checkpoint that was found complete.

    Args:
        step: its step.
        name: its folder in the output location.
        digest: the digest of the checkpoint's manifest, which has the digests of all files.
        size_bytes: the size of all files of the checkpoint.
        is_read: whether all files were read and compared with their digests. If not, only their names and sizes were
            compared.
    """

    step: int
    name: str
    digest: str
    size_bytes: int
    is_read: bool


def check_checkpoint(
    location: str, step: int, *, deep: bool, progress: Callable[[int, int], None] | None = None
) -> CheckpointReceipt:
    """Check the checkpoint of `step`. The files of an object store are not read: their uploads were verified.

    Args:
        location: the output location.
        step: the step of the checkpoint.
        deep: whether to read all files of the checkpoint. It has no effect for an object store.
        progress: called with bytes read so far and bytes in all.

    Raises:
        CheckpointError: the checkpoint does not exist, or is not complete.
        StorageError: the location cannot be read.
    """
    place, name = parse_location(location), checkpoint_name(step)
    manifest: Manifest | None = None
    faults: tuple[Fault, ...] = ()
    if place.is_folder:
        verdict = verify(place.folder / name, deep=deep, progress=progress)
        manifest, faults = verdict.manifest, verdict.faults
    else:
        store = open_store(place)
        try:
            manifest = RemoteFolder(store).manifest(step)
        except (ManifestError, UnreadableError) as error:
            raise CheckpointError(f"{place.child(name)} is not complete: {error}") from error
        sizes = {item.key.removeprefix(f"{name}/"): item.size_bytes for item in store.list(name)}
        faults = tuple(compare_listing(manifest.files, sizes))
    if manifest is None or faults or manifest.step != step:
        why = faults[0] if faults else "it has no manifest of this step"
        raise CheckpointError(f"{place.child(name)} is not complete: {why}")
    return CheckpointReceipt(
        step=manifest.step,
        name=name,
        digest=str(json.loads(manifest.to_bytes())["manifest_digest"]),
        size_bytes=manifest.size_bytes,
        is_read=deep and place.is_folder,
    )
