"""From a location to the store that serves it."""

from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location, Scheme, claim_folder
from safepoint.storage.options import StorageOptions
from safepoint.storage.store import Store


def open_store(location: Location, options: StorageOptions | None = None) -> Store:
    """The store at `location`; nothing is asked of it yet.

    Args:
        location: where.
        options: how to reach an object store; from the environment when None.

    Raises:
        ValueError: a `pvc` location outside a pod that mounts the claim, or options that cannot be meant.
    """
    if location.scheme is Scheme.PVC:
        location = claim_folder(location)
    if location.scheme is Scheme.FILE:
        return LocalStore(location)
    # obstore takes 50 ms to import, and a job on a folder does not need it.
    from safepoint.storage.object_store import ObjectStore

    return ObjectStore(location, options or StorageOptions.from_environment())
