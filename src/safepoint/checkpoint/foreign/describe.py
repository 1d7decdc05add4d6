"""Computes the manifest that a checkpoint of another program would have.

`describe` reads each file of the checkpoint once, and computes its digest. `examine` has read parts of some files
before. If the bytes of these parts have changed since then, `describe` refuses the checkpoint.

The same files always get the same manifest. So if a start is repeated, it continues the same run.
"""

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from safepoint.checkpoint.foreign.examine import Examination
from safepoint.checkpoint.foreign.layout import ARGUMENTS
from safepoint.checkpoint.format.digest import FileDigester, digest_bytes
from safepoint.checkpoint.format.manifest import FileEntry, Manifest, ManifestFacts, Trigger
from safepoint.checkpoint.remote.refusals import Refusals
from safepoint.errors import CheckpointError, ObjectNotFoundError, SafepointError, StorageError
from safepoint.foundation import clock
from safepoint.foundation.units import ByteCounter
from safepoint.storage.store import Store

_NUM_THREADS = 4


def describe(store: Store, found: Examination, progress: Callable[[int, int], None] | None = None) -> Manifest:
    """The manifest of a checkpoint that was examined.

    Args:
        store: see `examine`.
        found: the result of `examine`, without faults.
        progress: called with the number of bytes read so far, and the number of all bytes.

    Raises:
        CheckpointError: the checkpoint has changed since it was examined; it has too many files for a manifest; a
            value in it cannot be part of a manifest; a file in a folder cannot be read; or the object store refuses
            an object of the checkpoint, but serves other objects.
        StorageError: the object store cannot be read.
    """
    facts = found.facts
    if facts is None:
        raise ValueError(f"{found.name} has faults, so it has no manifest")
    try:
        return _describe(store, found, facts, progress)
    except ObjectNotFoundError as error:
        raise CheckpointError(f"{found.name} changed while it was read: {error.message}") from error
    except StorageError as error:
        if not store.location.is_folder:  # this is an error of the store, not of this checkpoint
            raise
        raise CheckpointError(f"{found.name} cannot be read: {error.message}") from error
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"a manifest of {found.name} cannot be made: {error}") from error


def _describe(
    store: Store, found: Examination, facts: ManifestFacts, progress: Callable[[int, int], None] | None
) -> Manifest:
    counter, lock = ByteCounter(progress, sum(found.files.values())), threading.Lock()

    def entry_of(path: str) -> FileEntry:
        digester, comparison = FileDigester(), found.read.comparing(path)

        def take(block: memoryview) -> None:
            digester.update(block)
            comparison.take(block)
            with lock:
                counter.add(len(block))

        if found.files[path]:
            key = f"{found.name}/{path}"
            with Refusals(store).as_fault(key):
                store.stream(key, take, start=0, length=found.files[path])
        comparison.finish()
        return FileEntry.of(path, digester.result())

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="safepoint-describe") as threads:
        entries = tuple(threads.map(entry_of, sorted(found.files)))
    _check_unchanged(store, found)
    # All checkpoints of one run of the Trainer have the same arguments, so they get the same run id.
    of_run = [entry for entry in entries if entry.path == ARGUMENTS] or entries
    run_id = digest_bytes("".join(entry.digest for entry in of_run).encode()).rpartition(":")[2]
    facts = dataclasses.replace(facts, run_id=run_id)
    manifest = facts.to_manifest(trigger=Trigger.PERIODIC, files=entries)
    manifest = dataclasses.replace(manifest, created=clock.as_utc(found.modified_s))
    try:
        manifest.to_bytes()
    except SafepointError as error:
        raise CheckpointError(f"{found.name} has too many files: {error.message}") from error
    return manifest


def _check_unchanged(store: Store, found: Examination) -> None:
    listed = {item.key.removeprefix(f"{found.name}/"): item for item in store.list(found.name)}
    newest_s = max((item.modified_s for item in listed.values()), default=0.0)
    if {path: item.size_bytes for path, item in listed.items()} != dict(found.files) or newest_s > found.modified_s:
        raise CheckpointError(f"{store.location.child(found.name)} changed while it was read; nothing of it is used")
