"""Errors that are both: Safepoint's, with its exit codes, and those that callers of Kubeflow's client expect."""

import contextlib
from collections.abc import Generator

from safepoint.errors import (
    ConflictError,
    NotFoundError,
    SafepointError,
    StorageError,
    UnsupportedError,
    UsageError,
    WaitTimeoutError,
)


class MissingExtraError(UnsupportedError, ImportError):
    """A package is not installed."""


class NotSupportedHereError(UnsupportedError, NotImplementedError, ValueError):
    """This kind of jobs cannot do that."""


class InvalidRequestError(UsageError, ValueError):
    """An argument cannot be meant."""


class JobNotFoundError(NotFoundError, RuntimeError, ValueError):
    """There is no such job, or none of its keys; Kubeflow raises one or the other, by its backend."""


class JobConflictError(ConflictError, RuntimeError):
    """A job's state does not allow that."""


class JobFailedError(SafepointError, RuntimeError):
    """A job has failed that was to get somewhere else, or could not be started."""


class JobStorageError(StorageError, RuntimeError):
    """A place cannot be used: of the jobs, or of their checkpoints."""


class JobTimeoutError(WaitTimeoutError, TimeoutError):
    """Something that was waited for took longer; it goes on."""


_KINDS: tuple[tuple[type[SafepointError], type[SafepointError]], ...] = (
    (UsageError, InvalidRequestError),
    (NotFoundError, JobNotFoundError),
    (ConflictError, JobConflictError),
    (StorageError, JobStorageError),
    (WaitTimeoutError, JobTimeoutError),
    (UnsupportedError, NotSupportedHereError),
    (SafepointError, JobFailedError),
)


@contextlib.contextmanager
def as_kubeflow_raises() -> Generator[None]:
    """Raise what is raised inside as an error of both kinds."""
    try:
        yield
    except SafepointError as error:
        kind = next(own for general, own in _KINDS if isinstance(error, general))
        if isinstance(error, kind):
            raise
        raise kind(error.message, hint=error.hint) from error
