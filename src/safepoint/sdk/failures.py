"""Errors of the SDK: each is one of Safepoint's, with its exit code, and one that Kubeflow's client raises."""

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
    """This backend cannot do that."""


class InvalidRequestError(UsageError, ValueError):
    """An argument is invalid."""


class JobNotFoundError(NotFoundError, RuntimeError, ValueError):
    """There is no such job or data connection. Kubeflow's backends raise RuntimeError or ValueError for it."""


class JobConflictError(ConflictError, RuntimeError):
    """A job's state does not allow that."""


class JobFailedError(SafepointError, RuntimeError):
    """A job has failed, or could not be started."""


class JobStorageError(StorageError, RuntimeError):
    """The history of jobs or an output location cannot be used."""


class JobTimeoutError(WaitTimeoutError, TimeoutError):
    """The job did not reach the state in time; it continues."""


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
    """Turn errors of Safepoint that are raised inside into the SDK's."""
    try:
        yield
    except SafepointError as error:
        kind = next(own for general, own in _KINDS if isinstance(error, general))
        if isinstance(error, kind):
            raise
        raise kind(error.message, hint=error.hint) from error
