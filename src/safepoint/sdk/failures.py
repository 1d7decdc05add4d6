"""Exceptions of the SDK. Each is an exception of Safepoint and also of the type that Kubeflow's client raises."""

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
from safepoint.settings.wording import in_sdk_words


class NotSupportedHereError(UnsupportedError, NotImplementedError, ValueError):
    """The backend does not support the request."""


class InvalidRequestError(UsageError, ValueError):
    """An argument is invalid."""


class JobNotFoundError(NotFoundError, RuntimeError, ValueError):
    """There is no such job or data connection. Kubeflow's backends raise RuntimeError or ValueError in this case."""


class JobConflictError(ConflictError, RuntimeError):
    """The state of the job does not allow the request."""


class JobFailedError(SafepointError, RuntimeError):
    """A job has failed, or could not be started."""


class JobStorageError(StorageError, RuntimeError):
    """The history of jobs or an output location cannot be used."""


class JobTimeoutError(WaitTimeoutError, TimeoutError):
    """The job did not reach the state in time. The job continues."""


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
    """In this context, replace an exception of Safepoint by the matching exception of this module."""
    try:
        yield
    except SafepointError as error:
        kind = next(own for general, own in _KINDS if isinstance(error, general))
        if isinstance(error, kind):
            raise
        hint = None if error.hint is None else in_sdk_words(error.hint)
        raise kind(in_sdk_words(error.message), hint=hint) from error
