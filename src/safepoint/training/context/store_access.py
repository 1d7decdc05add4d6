"""The object store of a run, tried before anything is loaded for it."""

import logging
from collections.abc import Mapping

from safepoint.errors import UsageError
from safepoint.storage.access import check_access
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.storage.options import StorageOptions
from safepoint.storage.store import Store

_log = logging.getLogger("safepoint")


def open_tried(location: Location, *, verify_access: bool = True, environ: Mapping[str, str] | None = None) -> Store:
    """The object store, after it was written, read, listed and deleted in once, unless that is not wanted.

    Args:
        location: where.
        verify_access: whether it is tried.
        environ: what says how to reach it; the process's own when None.

    Raises:
        UsageError: the environment's options cannot be meant.
        StorageError: it cannot be used, with the reason.
    """
    try:
        options = StorageOptions.from_environment(environ)
    except ValueError as error:
        raise UsageError(f"{error}; training was not started") from error
    if not options.verify_tls:
        _log.warning(
            "SAFEPOINT_VERIFY_TLS=0: the certificate of %s is NOT verified; anybody in between can read and change "
            "the checkpoints",
            options.endpoint or location,
        )
    store = open_store(location, options)
    if verify_access:
        check_access(store)
    return store
