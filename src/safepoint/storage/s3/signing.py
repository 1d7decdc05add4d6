"""AWS Signature Version 4 (`safepoint.storage.s3.requests` sends the requests).

The payload is not signed, because the checkpoint's digests protect its content.
Source: "Signature Version 4 signing process" in the Amazon S3 API reference.
"""

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote

_UNSIGNED = "UNSIGNED-PAYLOAD"


def signed_headers(
    *,
    method: str,
    path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    access_key_id: str,
    secret_access_key: str,
    session_token: str | None,
    region: str,
    now: datetime | None = None,
) -> dict[str, str]:
    """The headers of a request, with its signature.

    Args:
        method: `GET`, `PUT`, `POST`, `DELETE`.
        path: the path of the URL, already percent-encoded.
        query: names and values, not encoded.
        headers: the other headers to send and sign, among them `host`; names in lower case.
        access_key_id: the public name of the secret key.
        secret_access_key: the secret key, with which the request is signed.
        session_token: the token of temporary keys; None for permanent keys.
        region: the region of the bucket.
        now: when the request is sent; None for the current time.
    """
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    sent = {**headers, "x-amz-content-sha256": _UNSIGNED, "x-amz-date": stamp}
    if session_token:
        sent["x-amz-security-token"] = session_token
    names = sorted(sent)
    canonical = "\n".join(
        [
            method,
            path,
            encoded_query(query),
            *(f"{name}:{sent[name].strip()}" for name in names),
            "",
            ";".join(names),
            _UNSIGNED,
        ]
    )
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{secret_access_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"Credential={access_key_id}/{scope}"
    sent["authorization"] = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={';'.join(names)}, Signature={signature}"
    return sent


def encoded_query(query: Mapping[str, str]) -> str:
    """The query as it is signed and sent: sorted, percent-encoded."""
    pairs = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in query.items())
    return "&".join(f"{name}={value}" for name, value in pairs)


def encoded_path(path: str) -> str:
    """A path as it is signed and sent."""
    return quote(path, safe="/-_.~")
