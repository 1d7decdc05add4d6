"""Loads a file of `torch.save` that an attacker may have written."""

import os
import threading
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch import _weights_only_unpickler as restricted

from safepoint.checkpoint.pickles.archive_records import check_records
from safepoint.checkpoint.pickles.loaded_values import finish, with_stand_ins
from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.checkpoint.pickles.torch_unpickler import CheckedUnpickler, records_of


class OldFormatError(ValueError):
    """The file has the format that torch wrote before release 1.6.

    In this format a tensor can be larger than the file, and its memory would not be initialised.
    """


_ZIP = b"PK\x03\x04"
_lock = threading.RLock()
"""Held during a load, because torch's list of allowed classes and its unpickler are those of the whole process."""


def _renew_lock() -> None:
    """A forked process does not have the thread that would release the lock."""
    global _lock  # noqa: PLW0603  a lock of another thread cannot be released
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def restricted_load(
    file: Any, *, load: Callable[..., Any] = torch.load, also: Collection[Any] = (), **options: Any
) -> Any:
    """Load a file with `weights_only=True`, and with further checks.

    Args:
        file: the path of the file, or the open file.
        load: `torch.load`; the original function, if the caller has replaced `torch.load`.
        also: further classes to allow. The classes of torch and of `add_safe_globals` are always allowed.
        options: further arguments for `load`.

    Raises:
        OSError: the file cannot be read.
        OldFormatError: see the class; or the file is damaged.
        Exception: the file is damaged, or it contains something that is not allowed. Hostile content may raise any
            exception.
    """
    sizes = _check_archive(file)
    serialization: Any = torch.serialization
    with _lock:
        before = serialization.get_safe_globals()
        serialization.clear_safe_globals()
        try:
            serialization.add_safe_globals(with_stand_ins([*before, *also]))
            with (
                records_of(sizes),
                temporarily(restricted, Unpickler=CheckedUnpickler),
                torch.sparse.check_sparse_tensor_invariants(True),
            ):
                return finish(load(file, **{"weights_only": True, **options}))
        finally:
            serialization.clear_safe_globals()
            serialization.add_safe_globals(before)


def _check_archive(file: Any) -> dict[str, int]:
    """See `check_records`."""
    if isinstance(file, str | os.PathLike):
        with open(cast("Any", file), "rb") as opened:
            return _check_opened(opened)
    return _check_opened(file)


def _check_opened(file: Any) -> dict[str, int]:
    place = file.tell()
    begins_as_zip = file.read(len(_ZIP)) == _ZIP
    file.seek(place)
    if not begins_as_zip:
        raise OldFormatError("the file does not have the format that torch.save writes since torch 1.6")
    return check_records(file)
