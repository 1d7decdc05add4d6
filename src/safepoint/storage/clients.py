"""Makes obstore's clients. They send tokens only to the store, and to the hosts that issue credentials."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore, S3Store

from safepoint.storage.failures import BLOCKED
from safepoint.storage.location import Location, Scheme
from safepoint.storage.options import StorageOptions, proxy_of
from safepoint.storage.s3.credentials import Keys
from safepoint.storage.s3.retry import DEFAULT_WITHIN_S

Client = Any  # obstore has no public type for all its stores
_AWS, _METADATA = "amazonaws.com,amazonaws.com.cn", "169.254.0.0/16,fd00:ec2::/32"
_NUM_STREAM_TRIES = 10


def make_client(
    location: Location, options: StorageOptions, timeout_s: float, keys: Keys | None, *, is_repeating: bool = False
) -> Client:
    """A client for the requests to one location.

    Args:
        location: `s3`, `gs` or `az`.
        options: how to reach it.
        timeout_s: of each request.
        keys: for S3; None lets obstore look for an instance's role.
        is_repeating: whether obstore repeats failed requests itself.
    """
    client_options: dict[str, Any] = {
        "allow_http": True,
        "timeout": timedelta(seconds=timeout_s),
        # If the server sends nothing, the request fails after a shorter time than if the server is slow.
        "read_timeout": timedelta(seconds=min(timeout_s, options.request_timeout_s)),
        "connect_timeout": timedelta(seconds=min(timeout_s, 10.0)),
        "allow_invalid_certificates": not options.verify_tls,
    }
    if options.ca_bundle:
        client_options["root_certificate"] = Path(options.ca_bundle).read_bytes()
    common: dict[str, Any] = {
        "prefix": location.path or None,
        "client_options": client_options,
        "retry_config": {
            "max_retries": _NUM_STREAM_TRIES if is_repeating else 0,
            "retry_timeout": timedelta(seconds=DEFAULT_WITHIN_S),
        },
    }
    if location.scheme is Scheme.S3:
        client_options |= _only_to(options, has_keys=keys is not None)
        given = {
            "endpoint": options.endpoint,
            "access_key_id": keys and keys.access_key_id,
            "secret_access_key": keys and keys.secret_access_key,
            "session_token": keys and keys.session_token,
            "checksum_algorithm": None if keys else "SHA256",
        }
        return S3Store(
            location.bucket,
            region=options.region,
            unsigned_payload=True,
            virtual_hosted_style_request=options.endpoint is None,
            **{name: value for name, value in given.items() if value is not None},
            **common,
        )
    if location.scheme is Scheme.GS:
        return GCSStore(location.bucket, **common)
    return AzureStore(location.bucket, **common)


def _only_to(options: StorageOptions, *, has_keys: bool) -> dict[str, Any]:
    """Options with which obstore sends the session token to no other host, and unencrypted only to an http endpoint.

    obstore follows redirects. It may send requests to the store, and to the hosts that issue credentials. For all
    other hosts the options name a proxy address at which nothing listens, so that requests to them fail.

    Exception: if the environment names a proxy for https, and the endpoint is encrypted, all requests go through that
    proxy. It passes them on in a TLS tunnel, so it cannot read the token.
    """
    endpoint = urlsplit(options.endpoint or "https://")
    only_encrypted: dict[str, Any] = {"allow_http": endpoint.scheme == "http"}
    if proxy_of(options.endpoint or "https://") is not None:
        return only_encrypted
    hosts = [endpoint.hostname or _AWS]
    if not has_keys:
        named = [value for name, value in os.environ.items() if name.startswith("AWS_") and "://" in value]
        hosts += [_AWS, _METADATA, *(urlsplit(value).hostname or "" for value in named)]
    return only_encrypted | {"proxy_url": f"http://{BLOCKED}", "proxy_excludes": ",".join(filter(None, hosts))}
