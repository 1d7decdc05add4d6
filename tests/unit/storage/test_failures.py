"""From what libraries and servers say to what a reader can do."""

import pytest

from safepoint.errors import AccessDeniedError, ConditionError, ObjectNotFoundError, StorageError, TransientError
from safepoint.storage.failures import from_connection, from_status


@pytest.mark.parametrize(
    ("status", "code", "kind", "word"),
    [
        (404, "NoSuchBucket", ObjectNotFoundError, "no such bucket"),
        (404, "NoSuchKey", ObjectNotFoundError, "no such object"),
        (403, "InvalidAccessKeyId", AccessDeniedError, "wrong or have expired"),
        (400, "ExpiredToken", AccessDeniedError, "wrong or have expired"),
        (403, "AccessDenied", AccessDeniedError, "do not permit the request"),
        (403, "RequestTimeTooSkewed", TransientError, "busy or failing"),
        (412, "", ConditionError, "another writer"),
        (409, "", ConditionError, "another writer"),
        (429, "", TransientError, "busy"),
        (503, "SlowDown", TransientError, "busy"),
        (400, "InvalidRange", StorageError, "refused"),
    ],
)
def test_an_answer(status: int, code: str, kind: type[StorageError], word: str) -> None:
    """Each has the class that decides whether it is repeated, and words of its own."""
    error = from_status(status, code, "PUT s3://bucket/key")
    assert isinstance(error, kind)
    assert word in str(error)
    assert "PUT s3://bucket/key" in str(error)


@pytest.mark.parametrize(
    ("text", "kind", "word"),
    [
        ("SSLCertVerificationError CERTIFICATE_VERIFY_FAILED", StorageError, "not trusted"),
        ("error sending request: invalid peer certificate: UnknownIssuer", StorageError, "not trusted"),
        ("client error (Connect): dns error: failed to lookup address", TransientError, "name is unknown"),
        ("tcp connect error: Connection refused (os error 111)", TransientError, "cannot be reached"),
        ("ConnectionRefusedError [Errno 111] Connection refused", TransientError, "cannot be reached"),
        ("TimeoutError timed out", TransientError, "in time"),
        (
            "error sending request | RetryErrorImpl { retry_timeout: 180s } HttpError { kind: Timeout }",
            TransientError,
            "in time",
        ),
        ("error sending request | RetryErrorImpl { retry_timeout: 180s }", TransientError, "cut off"),
        # A connection that broke is not one that could not be made.
        ("ConnectionResetError [Errno 104] Connection reset by peer", TransientError, "cut off"),
        # A bucket may be called anything.
        ("error for url (http://certificate-store.example.com/x): connection closed", TransientError, "cut off"),
        ("error for url (http://refused.example.com/timeout): closed", TransientError, "cut off"),
    ],
)
def test_no_answer(text: str, kind: type[StorageError], word: str) -> None:
    """Only a certificate is not worth another try."""
    error = from_connection(text, "PUT s3://bucket/key")
    assert isinstance(error, kind)
    assert word in str(error)


@pytest.mark.parametrize(
    "error",
    [
        from_status(403, "InvalidAccessKeyId", "PUT gs://bucket/key"),
        from_status(301, "", "PUT gs://bucket/key"),
        from_connection("dns error: failed to lookup address", "PUT az://bucket/key"),
        from_connection("tcp connect error: Connection refused (os error 111)", "PUT az://bucket/key"),
    ],
)
def test_a_hint_says_which_variables_are_only_for_s3(error: StorageError) -> None:
    """The same hints are for gs:// and az://, which read other variables."""
    hint = error.hint or ""
    assert "check" in hint
    assert "AWS_" in hint.partition("for s3://:")[2]
    assert "AWS_" not in hint.partition("for s3://:")[0]
