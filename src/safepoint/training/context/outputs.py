"""The output folders of the trainings of this process, and the object store to which each folder is uploaded."""

import logging
from collections.abc import Mapping
from pathlib import Path

from safepoint.errors import UsageError
from safepoint.storage.location import Location
from safepoint.storage.opening import check_access, open_store
from safepoint.storage.options import StorageOptions
from safepoint.storage.store import Store

_log = logging.getLogger("safepoint")


class Outputs:
    """The output folders of this process; each training has one."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()
        self._stores: dict[Path, Location] = {}

    def claim(self, folder: Path, *, hint: str) -> None:
        """Record that a training of this process writes into `folder`.

        Raises:
            UsageError: an earlier training of this process has written into the folder; `hint` says what to do.
        """
        if self.contains(folder):
            raise UsageError(
                f"a second training into {folder} would resume from the checkpoints of the first", hint=hint
            )
        self._folders.add(folder.absolute())

    def contains(self, folder: Path) -> bool:
        """Whether a training of this process writes, or has written, into `folder`."""
        return folder.absolute() in self._folders

    @property
    def is_empty(self) -> bool:
        """Whether no training of this process has begun."""
        return not self._folders

    def set_store(self, folder: Path, location: Location) -> None:
        """Record that checkpoints of `folder` are uploaded to `location`."""
        self._stores[folder.absolute()] = location

    def store_of(self, folder: str | Path) -> Location | None:
        """Where checkpoints of `folder` are uploaded to; None when they stay in the folder."""
        return self._stores.get(Path(folder).absolute())


def open_checked(
    location: Location, *, verify_access: bool = True, environ: Mapping[str, str] | None = None
) -> Store:
    """Open an object store, and check that this process can write, read, list and delete an object there.

    Args:
        location: where the store is.
        verify_access: whether to make that check.
        environ: the variables with the store's options; None for the process's environment.

    Raises:
        UsageError: the environment's options are invalid.
        StorageError: the store cannot be used; the message says why.
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
