"""Opens the object store of a run, and tries it before anything is loaded."""

import logging
from collections.abc import Mapping

from safepoint.errors import UsageError
from safepoint.storage.location import Location
from safepoint.storage.opening import check_access, open_store
from safepoint.storage.options import StorageOptions
from safepoint.storage.store import Store

_log = logging.getLogger("safepoint")


def open_tried(location: Location, *, verify_access: bool = True, environ: Mapping[str, str] | None = None) -> Store:
    """Open the object store, and try it: write, read, list and delete one object.

    Args:
        location: where.
        verify_access: whether to try it.
        environ: how to reach it; the process's environment when None.

    Raises:
        UsageError: the environment's options are invalid.
        StorageError: the store cannot be used, with the reason.
    """
    try:
        options = StorageOptions.from_environment(environ)
    except ValueError as error:
        raise UsageError(f"{error}; training was not started") from error
    if not options.verify_tls:
        _log.warning(
            "SAFEPOINT_VERIFY_TLS=0: the certificate of %s is NOT verified; anyone on the network path can read and "
            "change the checkpoints",
            options.endpoint or location,
        )
    store = open_store(location, options)
    if verify_access:
        check_access(store)
    return store
