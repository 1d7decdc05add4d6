"""Converts error answers of an API server into exceptions of Safepoint."""

import contextlib
import re
from typing import Any

import httpx2

from safepoint.errors import (
    AccessDeniedError,
    ConflictError,
    NotFoundError,
    SafepointError,
    StorageError,
    TransientError,
    UsageError,
)
from safepoint.jobs.cluster.objects import at
from safepoint.jobs.cluster.transport.admission import is_temporary, refused_by_rule

_MOST_PAUSE_S = 30.0
_UNKNOWN = re.compile(r'unknown field "([^"]{1,200})"')


class GoneError(TransientError):
    """The API server no longer has the version at which a watch or a list would continue; list from the start."""


class TooMuchError(StorageError):
    """There are too many objects, or they are too large: Safepoint does not read or keep them."""


class AlreadyExistsError(ConflictError):
    """An object of this name exists."""


class UnknownFieldError(UsageError):
    """An object has fields that the cluster does not support. The cluster has not created the object."""

    fields: tuple[str, ...] = ()


class BusyError(TransientError):
    """The server is busy. `pause_s` is the pause that it requests before the next try; 0 if it requests no pause."""

    pause_s: float = 0.0


class RejectedError(BusyError):
    """The server has rejected a request, and has not carried it out. For any other BusyError, this is not certain."""


class NotAdmittedError(RejectedError):
    """A webhook that the cluster calls before it changes an object did not answer: nothing was changed."""


_WEBHOOK = "failed calling webhook"
_KINDS: dict[int, type[SafepointError]] = {
    **dict.fromkeys((400, 405, 413, 415, 422), UsageError),
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
}


def reason_of(error: Exception) -> str:
    """Why a request failed. The text does not quote the request, which contains the token."""
    if isinstance(error, httpx2.LocalProtocolError):  # do not show the text of this error, which quotes the header
        return "the login has characters that a request cannot contain"
    return str(error) or type(error).__name__


def unreachable(name: str, error: Exception) -> SafepointError:
    """The exception to raise when cluster `name` did not answer, because of `error`."""
    reason = reason_of(error)
    if "certificate verify failed" in reason.lower():
        return StorageError(
            f"the certificate of cluster {name} is not trusted: {reason}",
            hint="fix the field `certificate-authority` in the kubeconfig",
        )
    return TransientError(
        f"cluster {name} cannot be reached: {reason}", hint="check the network, and the server in the kubeconfig"
    )


def refusal(status: int, document: dict[str, Any], what: str, *, after_s: str | None = None) -> SafepointError:
    """The exception to raise for an error answer of the API server.

    Args:
        status: the HTTP status.
        document: the body of the answer, a Kubernetes Status; empty if the body is no JSON object.
        what: the request, for the message.
        after_s: the value of the header Retry-After.
    """
    reason, message = str(document.get("reason") or ""), str(document.get("message") or f"HTTP status {status}")
    if status in {401, 403}:
        return _forbidden(status, document, what, message)
    unknown = tuple(_UNKNOWN.findall(message))
    if status == 400 and unknown:
        error = UnknownFieldError(f"the cluster refuses the request {what}: {message}")
        error.fields = unknown
        return error
    if status in _KINDS:
        hint = None
        if status == 404 and at(document, "details", "kind") == "namespaces":
            message = f"there is no namespace {at(document, 'details', 'name')}; nothing was done"
            hint = "correct --namespace, or the namespace of the context"
        kind = AlreadyExistsError if reason == "AlreadyExists" else _KINDS[status]
        return kind(
            f"the cluster refuses the request {what}: {message}" if kind is UsageError else message, hint=hint
        )
    if status == 429 or status >= 500:
        return _busy(what, message, after_s, is_rejected=status == 429)
    return StorageError(f"the cluster answered {what} with HTTP status {status}: {message}")


def _forbidden(status: int, document: dict[str, Any], what: str, message: str) -> SafepointError:
    if is_temporary(message):
        return RejectedError(f"the cluster could not answer {what}: {message}", hint="try again later")
    refused = refused_by_rule(document)
    if refused is not None:
        return refused
    if status == 401:
        return AccessDeniedError(f"the cluster does not accept your login: {message}", hint="log in again")
    return AccessDeniedError(
        f"you are not allowed to do this: {message}",
        hint="`safepoint doctor --on PLACE` lists the rights that are missing",
    )


def _busy(what: str, message: str, after_s: str | None, *, is_rejected: bool) -> BusyError:
    if _WEBHOOK in message:
        return NotAdmittedError(
            f"the cluster could not answer {what}: {message}; nothing was changed",
            hint="try again later, or ask the cluster's administrator why this webhook does not answer",
        )
    kind = RejectedError if is_rejected else BusyError
    busy = kind(f"the cluster could not answer {what}: {message}", hint="try again later")
    with contextlib.suppress(ValueError):
        busy.pause_s = min(float(after_s or 0), _MOST_PAUSE_S)
    return busy
