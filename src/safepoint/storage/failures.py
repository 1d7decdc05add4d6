"""Translates errors of servers and libraries into messages that say what to do.

Messages show only the method and the address of a request, so they contain no credentials.
"""

import re

from safepoint.errors import (
    AccessDeniedError,
    ConditionError,
    ObjectNotFoundError,
    StorageError,
    TransientError,
)

_BUSY = {408, 425, 429, 500, 502, 503, 504}
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "AuthFailure"}
_WRONG_KEY_WORDS = (
    "the credentials are wrong or have expired",
    "check the keys (for s3://: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN)",
)
_NO_PERMISSION_WORDS = (
    "these credentials do not permit the request",
    "grant them permission to read, write, list and delete below the location",
)
_REDIRECT_HINT = "check the endpoint and the region (for s3://: AWS_ENDPOINT_URL_S3 and AWS_REGION)"
_TRANSIENT_CODES = {"RequestTimeout", "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeTooSkewed"}
_WRONG_CHECKSUM = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
_CERTIFICATE = re.compile(r"certificate|UnknownIssuer|self.signed|tls handshake|CERTIFICATE_VERIFY", re.IGNORECASE)
_ADDRESS = re.compile(r"\b[a-z0-9]+://[^\s\"')]+", re.IGNORECASE)
_CAUSES = (
    (
        r"dns error|failed to lookup|Name or service not known|nodename nor servname",
        "the host's name is unknown",
        "check the endpoint (for s3://: AWS_ENDPOINT_URL_S3)",
    ),
    (
        r"ConnectError|connect error|refused|unreachable|no route",
        "the server cannot be reached",
        "check the endpoint (for s3://: AWS_ENDPOINT_URL_S3) and the network",
    ),
    (
        # The word "timeout" is not enough, because libraries also show their settings.
        r"timed out|TimeoutError|TimedOut|kind: Timeout",
        "the server did not answer in time",
        "the network or the server is slow",
    ),
)
"""For requests without a response: a pattern in the library's message, the reason to show, and the hint to show."""


class RefusedKeysError(AccessDeniedError):
    """The server does not accept these keys; it may accept other keys."""


def from_status(status: int, code: str, what: str) -> StorageError:
    """The error for a response of the server.

    Args:
        status: the HTTP status.
        code: the error code in the response, such as `NoSuchBucket`; may be empty.
        what: what was tried, such as `PUT s3://bucket/key`.
    """
    answer = f"{what}: the server answered {status}{f' {code}' if code else ''}"
    if status == 404:
        is_bucket = code == "NoSuchBucket"
        hint = "create it, or fix the bucket's name in the location" if is_bucket else None
        return ObjectNotFoundError(f"{answer}: there is no such {'bucket' if is_bucket else 'object'}", hint=hint)
    is_wrong_key = code in _WRONG_KEY or status == 401
    if is_wrong_key or (status == 403 and code not in _TRANSIENT_CODES):
        why, hint = _WRONG_KEY_WORDS if is_wrong_key else _NO_PERMISSION_WORDS
        return (RefusedKeysError if is_wrong_key else AccessDeniedError)(f"{answer}: {why}", hint=hint)
    if status in {409, 412}:
        return ConditionError(
            f"{answer}: another writer was first, nothing was written",
            hint="another run writes to the same location; stop one of the two runs",
        )
    if code in _WRONG_CHECKSUM:
        return changed_in_transit(what)
    if status in _BUSY or code in _TRANSIENT_CODES:
        return TransientError(f"{answer}: it is busy or failing", hint="the fault is the server's; try again later")
    is_redirect = 300 <= status < 400
    why = "it redirects to another address; nothing was sent there" if is_redirect else "it refused the request"
    return StorageError(f"{answer}: {why}", hint=_REDIRECT_HINT if is_redirect else None)


def changed_in_transit(what: str) -> TransientError:
    """The error for content that did not reach the store as it was sent."""
    return TransientError(
        f"{what}: the content was changed on its way to the store; this upload has failed",
        hint="the network, a proxy or this machine's memory is damaged",
    )


def from_connection(text: str, what: str) -> StorageError:
    """The error for a request without a response.

    Args:
        text: the library's message; searched for known causes, and not shown.
        what: what was tried.
    """
    text = _ADDRESS.sub("", text)  # remove addresses, because the name of a bucket may look like a cause
    if _CERTIFICATE.search(text):
        return StorageError(
            f"{what}: the server's certificate is not trusted",
            hint="name the CA's PEM file in AWS_CA_BUNDLE; SAFEPOINT_VERIFY_TLS=0 turns the check off",
        )
    for cause, why, hint in _CAUSES:
        if re.search(cause, text, re.IGNORECASE):
            return TransientError(f"{what}: {why}", hint=hint)
    return TransientError(f"{what}: the connection was cut off or the answer was damaged")
