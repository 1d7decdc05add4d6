"""The options of object stores (endpoint, credentials, certificates), from the variables that other tools use too."""

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from safepoint.errors import StorageError, without_credentials
from safepoint.foundation.closed_requests import tunnel_proxy
from safepoint.foundation.quantities import parse_flag
from safepoint.foundation.shared_folders.ownership import read_trusted

_MOST_BYTES = 4 << 20
_REGION = re.compile(r"[A-Za-z0-9_-]{1,64}")


def proxy_of(url: str) -> str | None:
    """The environment's proxy for requests to `url`; None if there is no proxy, or if `url` is not `https:`.

    A proxy could read unencrypted requests. Encrypted requests pass through a proxy in a tunnel.

    Raises:
        StorageError: the address of the proxy does not begin with `http:`.
    """
    if urlsplit(url).scheme.lower() != "https":
        return None
    try:
        return tunnel_proxy(url)
    except OSError as error:
        raise StorageError(f"{error}; nothing was sent", hint="set HTTPS_PROXY to http://HOST:PORT") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """The options of an object store that are not in its URI.

    Args:
        endpoint: URL of an S3-compatible server; None for AWS itself.
        region: region of the bucket.
        access_key_id: the public name of the secret key; None if the keys come from another source
            (`safepoint.storage.s3.credentials`).
        secret_access_key: the secret key. It is in no message and no `repr`.
        session_token: the token of temporary keys; None for permanent keys.
        ca_bundle: PEM file with the certificates to trust instead of the system's.
        verify_tls: whether to check certificates; False accepts any certificate.
        request_timeout_s: how many seconds one request may take before it is repeated.
    """

    endpoint: str | None = None
    region: str = "us-east-1"
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    ca_bundle: str | None = None
    verify_tls: bool = True
    request_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.endpoint is not None and not self.endpoint.lower().startswith(("http://", "https://")):
            raise ValueError(f"endpoint {without_credentials(self.endpoint)!r} must begin with http:// or https://")
        # The region is a part of the names of AWS's servers. Another person may set the region, in an object of the
        # cluster, and must not be able to choose a host with it.
        if not _REGION.fullmatch(self.region):
            raise ValueError(
                f"the region {self.region[:80]!r} (AWS_REGION) is invalid: use letters, digits, `-` and `_` only, "
                "at most 64 characters"
            )
        if not 0 < self.request_timeout_s < float("inf"):
            raise ValueError(f"request_timeout_s {self.request_timeout_s} must be a positive number of seconds")
        if self.ca_bundle is not None and not os.path.isfile(self.ca_bundle):
            raise ValueError(f"ca_bundle {self.ca_bundle!r} is not a file; name a PEM file")

    def authorities(self) -> bytes | None:
        """The content of `ca_bundle`; None if it is not set. The file decides which servers get keys and checkpoints.

        Raises:
            StorageError: another user may have written the file, or it cannot be read.
        """
        if self.ca_bundle is None:
            return None
        try:
            return read_trusted(self.ca_bundle, _MOST_BYTES)
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error

    def _unusable(self, why: str) -> StorageError:
        return StorageError(
            f"the certificates in {self.ca_bundle} (AWS_CA_BUNDLE) were not used: {why}; nothing was sent",
            hint="name a PEM file that only you can write to",
        )

    def tls_context(self) -> ssl.SSLContext:
        """The settings of TLS: which certificates are trusted.

        Raises:
            StorageError: see `authorities`; or the file contains no certificate.
        """
        trusted = self.authorities()
        if trusted is None:
            context = ssl.create_default_context()
        else:
            try:
                # Comments in the file may have any encoding. If the text were empty, the system's certificates
                # would be trusted. So a space replaces an empty text.
                context = ssl.create_default_context(cadata=trusted.decode("ascii", errors="ignore") or " ")
            except ssl.SSLError as error:
                raise self._unusable("it has no certificate in PEM format") from error
        if not self.verify_tls:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "StorageOptions":
        """Read AWS_* and SAFEPOINT_* variables.

        The endpoint is the first of AWS_ENDPOINT_URL_S3, AWS_S3_ENDPOINT (as in OpenShift AI's connections) and
        AWS_ENDPOINT_URL that is set. An endpoint without a scheme is used with https. A user name or password in an
        endpoint is ignored. AWS_CA_BUNDLE is the file of trusted certificates. SAFEPOINT_VERIFY_TLS=0 accepts any
        certificate.

        Raises:
            ValueError: a value is invalid, or only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set.
        """
        environ = os.environ if environ is None else environ

        def first(*names: str) -> str | None:
            return next((environ[name].strip() for name in names if environ.get(name, "").strip()), None)

        endpoint = first("AWS_ENDPOINT_URL_S3", "AWS_S3_ENDPOINT", "AWS_ENDPOINT_URL")
        if endpoint is not None and "://" not in endpoint:
            endpoint = f"https://{endpoint}"
        keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        unset, given = sorted(keys, key=lambda name: first(name) is not None)
        if first(unset) is None and first(given) is not None:
            raise ValueError(f"{unset} is not set, but {given} is; set both of them or neither")
        return cls(
            endpoint=without_credentials(endpoint).rstrip("/") if endpoint else None,
            region=first("AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1",
            access_key_id=first("AWS_ACCESS_KEY_ID"),
            secret_access_key=first("AWS_SECRET_ACCESS_KEY"),
            session_token=first("AWS_SESSION_TOKEN"),
            ca_bundle=first("AWS_CA_BUNDLE"),
            verify_tls=parse_flag("SAFEPOINT_VERIFY_TLS", environ.get("SAFEPOINT_VERIFY_TLS", "1")),
        )
