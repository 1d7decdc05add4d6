"""From a location to the store that serves it."""

from collections.abc import Mapping

from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location, resolve_claim
from safepoint.storage.options import StorageOptions
from safepoint.storage.store import Store


def open_store(
    location: Location, options: StorageOptions | None = None, *, environ: Mapping[str, str] | None = None
) -> Store:
    """The store at `location`; no request is sent yet.

    Args:
        location: a folder, a claim or an object store.
        options: how to reach an object store; read from `environ` when None.
        environ: the variables that describe it; this process's own when None.

    Raises:
        ValueError: a claim for which no folder is known, or invalid options of an object store.
    """
    location = resolve_claim(location)
    if location.is_folder:
        return LocalStore(location)
    # obstore takes 50 ms to import, and a job on a folder does not need it.
    from safepoint.storage.object_store import ObjectStore

    return ObjectStore(location, options or StorageOptions.from_environment(environ))
