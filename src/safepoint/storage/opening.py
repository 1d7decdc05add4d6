"""Opens the store at a location, and checks that the store can be used. Callers make this check before they load a
model."""

import contextlib
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from safepoint.errors import StorageError
from safepoint.foundation import clock
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location, resolve_claim
from safepoint.storage.options import StorageOptions
from safepoint.storage.store import Store

_WITHIN_S = 15.0
_PROBE_PREFIX = ".safepoint/access-"
_PROBE = re.compile(f"{re.escape(_PROBE_PREFIX)}[0-9a-f]{{32}}")
_TIDY_WITHIN_S = 3.0


def is_probe(key: str) -> bool:
    """Whether `key` belongs to a test object that `try_access` writes and deletes."""
    return _PROBE.fullmatch(key) is not None


def open_store(
    location: Location, options: StorageOptions | None = None, *, environ: Mapping[str, str] | None = None
) -> Store:
    """The store at `location`; no request is sent yet.

    Args:
        location: a folder, a claim (a volume, mounted as a folder) or an object store.
        options: how to reach an object store; None reads them from `environ`.
        environ: the environment variables that contain the options; None for the variables of this process. The
            folder of a claim is always read from the variables of this process.

    Raises:
        ValueError: the claim's folder is not known, or the options of the object store are invalid.
        StorageError: a package that this kind of object store needs is missing.
    """
    location = resolve_claim(location)
    if location.is_folder:
        return LocalStore(location)
    # Imported here, because the import takes 50 ms, and a job on a folder does not need this module.
    from safepoint.storage.object_store import ObjectStore

    return ObjectStore(location, options or StorageOptions.from_environment(environ))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The measurements of `try_access`.

    Args:
        duration_s: how many seconds writing, reading, listing and deleting took together.
        clock_ahead_s: the store's clock minus this machine's clock, in seconds; accurate to a second or two.
    """

    duration_s: float
    clock_ahead_s: float


def try_access(store: Store, *, within_s: float = _WITHIN_S) -> Tried:
    """Write, read, list and delete one small object under a unique key.

    Args:
        store: the store.
        within_s: seconds after which to give up.

    Raises:
        StorageError: the store cannot be used. A wrong key, a missing bucket, a missing permission, an untrusted
            certificate and an unreachable host each have a message and a hint of their own.
    """
    begun_s = clock.monotonic_s()
    deadline_s = begun_s + within_s
    key = f"{_PROBE_PREFIX}{uuid.uuid4().hex}"
    data = key.encode()
    store.write(key, data, deadline_s=deadline_s)
    written_s = clock.wall_s()
    try:
        found = bytes(store.read(key, length=len(data), deadline_s=deadline_s))
        listed = {item.key: item for item in store.list(".safepoint", deadline_s=deadline_s)}
    except StorageError:
        with contextlib.suppress(StorageError):  # raise the first error, not the error of the deletion
            store.delete(key, deadline_s=clock.monotonic_s() + _TIDY_WITHIN_S)
        raise
    store.delete(key, deadline_s=deadline_s)
    if found != data or key not in listed:
        raise StorageError(
            "the store does not return the object that was just written to it",
            hint="if this is the address of a cache, use the address of the store behind it",
        )
    return Tried(duration_s=clock.monotonic_s() - begun_s, clock_ahead_s=listed[key].modified_s - written_s)


def check_access(store: Store) -> None:
    """Check that a training can use the store, see `try_access`.

    Raises:
        StorageError: the store cannot be used, with the reason.
    """
    try:
        try_access(store)
    except StorageError as error:
        message = f"{store.location} cannot be used: {error.message}; training was not started"
        raise error.with_message(message, hint=error.hint) from error
