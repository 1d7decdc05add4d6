"""Whether a place can be used, found out before a model is loaded for nothing."""

import contextlib
import uuid

from holdfast.errors import StorageError
from holdfast.foundation import clock
from holdfast.storage.store import Store

_WITHIN_S = 15.0
PROBE_PREFIX = ".holdfast/access-"
"""Of the keys that are written and deleted again."""
_TIDY_WITHIN_S = 3.0


def check_access(store: Store) -> None:
    """Write, read, list and delete one small object under a key that nobody else uses.

    Raises:
        StorageError: with its own message and hint for a wrong key, a missing bucket, no permission, an untrusted
            certificate and a host that cannot be reached.
    """
    deadline_s = clock.monotonic_s() + _WITHIN_S
    key = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    data = key.encode()
    try:
        store.write(key, data, deadline_s=deadline_s)
        try:
            found = bytes(store.read(key, deadline_s=deadline_s))
            listed = [item.key for item in store.list(".holdfast", deadline_s=deadline_s)]
        except StorageError:
            with contextlib.suppress(StorageError):  # what went wrong first is what is said
                store.delete(key, deadline_s=clock.monotonic_s() + _TIDY_WITHIN_S)
            raise
        store.delete(key, deadline_s=deadline_s)
    except StorageError as error:
        message = f"{store.location} cannot be used: {error.message}; training was not started"
        raise type(error)(message, hint=error.hint) from error
    if found != data or key not in listed:
        raise StorageError(
            f"{store.location} does not give back what was written to it; training was not started",
            hint="it may be a cache in front of a store; name the store itself",
        )


__all__ = ["PROBE_PREFIX", "check_access"]
