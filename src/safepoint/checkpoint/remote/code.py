"""The code of a job. It is stored beside the job's checkpoints under its digest, and the job's pods read it."""

import hashlib

from safepoint.errors import CheckpointError, ObjectNotFoundError, StorageError
from safepoint.foundation import files
from safepoint.storage.location import Location, parse_location
from safepoint.storage.opening import open_store
from safepoint.storage.store import Store

COMMAND = "put-code"
"""The name by which a command outside of the cluster calls `write_code` in a pod."""
PIECES = "/opt/safepoint-pieces"
"""The folder in that pod with the pieces of the code. The name of each piece is its number."""
MOST_BYTES = 64 << 20
"""The limit of the size of a job's code, in bytes."""


def read_code(text: str, digest: str) -> bytes:
    """The code of a job.

    Args:
        text: its location.
        digest: its SHA-256.

    Raises:
        StorageError: the code cannot be read, or is larger than `MOST_BYTES`.
        CheckpointError: its content has another digest; it is not used.
    """
    location = parse_location(text)
    data = _read(open_store(location.parent), location)
    if data is None:
        raise StorageError(
            f"the code of the job is not in {text}; nothing was trained", hint="submit the job once more"
        )
    if hashlib.sha256(data).hexdigest() != digest:
        raise CheckpointError(
            f"the code of the job in {text} has changed since it was submitted; nothing was trained",
            hint="delete this file, and submit the job once more",
        )
    return data


def write_code(location: Location, data: bytes, digest: str, store: Store | None = None) -> None:
    """Put the code of a job into its output location, unless the location has the code already.

    Args:
        location: where the code is written; its name contains the digest.
        data: the code.
        digest: its SHA-256.
        store: the store of the folder or prefix of `location`; opened with the variables of this process when None.

    Raises:
        StorageError: the code cannot be written.
        CheckpointError: `data` has another digest.
    """
    if hashlib.sha256(data).hexdigest() != digest:
        raise CheckpointError("the code of the job was changed on its way; nothing was written", hint="try again")
    store = open_store(location.parent) if store is None else store
    if _size(store, location) == len(data) and hashlib.sha256(_read(store, location) or b"").hexdigest() == digest:
        return
    if not store.location.is_folder:
        store.write(location.name, data)
        return
    path = store.location.folder / location.name
    try:
        files.make_folder(path.parent)
        files.write_atomic(path, data, durable=True)
    except OSError as error:
        raise StorageError(
            f"the code of the job cannot be written to {location}: {error.strerror}; nothing was submitted",
            hint="check the free space of the claim, and who may write to the folder",
        ) from error


def _read(store: Store, location: Location) -> bytes | None:
    """The object; None if there is none."""
    size_bytes = _size(store, location)
    if size_bytes is None:
        return None
    if size_bytes > MOST_BYTES:
        raise StorageError(f"{location} has more than {MOST_BYTES:,} bytes; it was not read")
    try:
        return bytes(store.read(location.name, most_bytes=size_bytes))
    except ObjectNotFoundError:
        return None


def _size(store: Store, location: Location) -> int | None:
    try:
        return store.stat(location.name).size_bytes
    except ObjectNotFoundError:
        return None
