"""The keys for S3. They may change during a run, so they are fetched again before they expire or if S3 refuses them.

As in AWS's tools, the keys come from the first of these sources that exists:

- keys in the environment;
- a role with a token file (web identity);
- a shared credentials file;
- the endpoint of a container;
- the role of an instance.
"""

import configparser
import os
import re
import threading
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from safepoint.errors import AccessDeniedError, StorageError, TransientError
from safepoint.foundation import clock
from safepoint.foundation.bounded_json import parse_object
from safepoint.foundation.closed_requests import exchange
from safepoint.foundation.environment import expand_home
from safepoint.foundation.shared_folders.ownership import UntrustedFileError, read_trusted
from safepoint.storage.failures import RefusedKeysError
from safepoint.storage.options import StorageOptions

_EARLY_S = 300.0
_REQUEST_S = 10.0
_MAX_BYTES = 1 << 16
_MAX_FILE_BYTES = 4 << 20
_HEADER_TEXT = re.compile("[!-~]*")
"""The ASCII characters of a header, without blanks."""
_T = TypeVar("_T")
_CONTAINER = "http://169.254.170.2"
_CONTAINER_HOSTS = {"169.254.170.2", "169.254.170.23", "fd00:ec2::23", "localhost", "127.0.0.1", "::1"}
_INSTANCE, _INSTANCE_S = "http://169.254.169.254", 2.0
_INSTANCE_HOSTS = {"169.254.169.254", "fd00:ec2::254", "localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys that sign requests at present.

    Args:
        access_key_id: the public name of the secret key.
        secret_access_key: the secret key. It is in no message and no `repr`.
        session_token: the token of temporary keys; None for other keys.
        expires_s: seconds since 1970; infinite for keys that do not expire.
    """

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    expires_s: float = float("inf")

    def __post_init__(self) -> None:
        given = [self.access_key_id, self.secret_access_key, self.session_token]
        if not all(_HEADER_TEXT.fullmatch(text) for text in given if text is not None):
            raise ValueError("a key or the session token has characters that a request cannot contain")


class KeySource:
    """The keys of a store. Several threads may use this object.

    Args:
        fetch: returns the newest keys. It raises OSError, ValueError or configparser.Error when there are none.
        origin: see the attribute.
    """

    def __init__(self, fetch: Callable[[], Keys], origin: str) -> None:
        self._fetch = fetch
        self.origin = origin
        """The name of the source of the keys, for messages."""
        self._keys: Keys | None = None
        self._lock = threading.Lock()

    def current(self) -> Keys:
        """The keys to use now.

        Raises:
            AccessDeniedError: the source is missing, cannot be read, or has no valid keys.
            TransientError: the source cannot be reached at this moment.
        """
        with self._lock:
            if self._keys is None or clock.wall_s() > self._keys.expires_s - _EARLY_S:
                try:
                    self._keys = self._fetch_keys()
                except StorageError:
                    if self._keys is None or clock.wall_s() > self._keys.expires_s:
                        raise
            return self._keys

    def use(self, work: Callable[[Keys], _T]) -> _T:
        """Call `work` with the current keys. If the server refuses them, call it once more with newly fetched keys.

        Raises:
            RefusedKeysError: the server has refused the newest keys.
            StorageError: see `current`, or what `work` raises.
        """
        keys = self.current()
        try:
            return work(keys)
        except RefusedKeysError:
            with self._lock:
                if self._keys == keys:
                    self._keys = self._fetch_keys()
                if self._keys == keys:
                    raise
            return work(self.current())

    def _fetch_keys(self) -> Keys:
        try:
            return self._fetch()
        except (FileNotFoundError, PermissionError, UntrustedFileError) as error:
            raise self._no_keys(AccessDeniedError, error.strerror or str(error)) from error
        except OSError as error:
            raise self._no_keys(TransientError, error.strerror or str(error)) from error
        except (ValueError, configparser.Error) as error:
            raise self._no_keys(AccessDeniedError, "it has no valid keys") from error

    def _no_keys(self, kind: type[StorageError], reason: str) -> StorageError:
        return kind(
            f"no keys for the object store were obtained from {self.origin}: {reason}",
            hint="renew the keys there, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )


def find_keys(options: StorageOptions, environ: Mapping[str, str]) -> KeySource:
    """The source of the keys.

    Args:
        options: the options of the store. They contain the keys if the environment sets keys.
        environ: the variables of AWS's tools.
    """
    if options.access_key_id and options.secret_access_key:
        keys = Keys(
            access_key_id=options.access_key_id,
            secret_access_key=options.secret_access_key,
            session_token=options.session_token,
        )
        return KeySource(lambda: keys, "AWS_ACCESS_KEY_ID")
    if environ.get("AWS_WEB_IDENTITY_TOKEN_FILE") and environ.get("AWS_ROLE_ARN"):
        return KeySource(lambda: _of_web_identity(options, environ), "the role AWS_ROLE_ARN")
    named = environ.get("AWS_SHARED_CREDENTIALS_FILE")
    path = expand_home(named or "~/.aws/credentials")
    profile = environ.get("AWS_PROFILE") or "default"
    if named or _has_profile(path, profile):
        return KeySource(lambda: _of_file(path, profile), f"{path}, profile {profile}")
    if environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") or environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        return KeySource(lambda: _of_container(environ), "the container's credentials")
    return KeySource(lambda: _of_instance(environ), "the environment or the role of an instance")


def _of_web_identity(options: StorageOptions, environ: Mapping[str, str]) -> Keys:
    token = _text_of(environ["AWS_WEB_IDENTITY_TOKEN_FILE"]).strip()
    query = {
        "Action": "AssumeRoleWithWebIdentity",
        "Version": "2011-06-15",
        "RoleArn": environ["AWS_ROLE_ARN"],
        "RoleSessionName": environ.get("AWS_ROLE_SESSION_NAME") or "safepoint",
        "WebIdentityToken": token,
    }
    url = environ.get("AWS_ENDPOINT_URL_STS") or f"https://sts.{options.region}.amazonaws.com"
    request = urllib.request.Request(url, data=urlencode(query).encode())
    data = exchange(
        request, to="the token service", timeout_s=_REQUEST_S, max_bytes=_MAX_BYTES, context=options.tls_context()
    )
    return _keys_of(_elements(data), token="SessionToken")


def _elements(data: bytes) -> dict[str, str]:
    """The texts in an XML answer of STS, by element."""
    found: list[tuple[str, str]] = re.findall(r"<(\w+)>([^<>&]*)</\1>", data.decode("utf-8"))
    return {name: text.strip() for name, text in found}


def _has_profile(path: Path, profile: str) -> bool:
    """Whether the file has keys for this profile.

    Also True if the file is not trusted, so that the file is refused later.
    """
    try:
        return bool(_of_file(path, profile))
    except UntrustedFileError:
        return True
    except (OSError, ValueError, configparser.Error, KeyError):
        return False


def _text_of(path: str | os.PathLike[str]) -> str:
    """The text of a file with keys.

    Raises:
        UntrustedFileError: another user may have put it there, it is not a file, or it is too large.
        OSError: the file cannot be read.
        ValueError: the file is not UTF-8.
    """
    return read_trusted(path, _MAX_FILE_BYTES).decode("utf-8")


def _of_file(path: Path, profile: str) -> Keys:
    parser = configparser.RawConfigParser()
    parser.read_string(_text_of(path))
    if not parser.has_section(profile):
        raise ValueError(f"there is no profile {profile}")
    section = dict(parser.items(profile))
    if not section.get("aws_access_key_id") or not section.get("aws_secret_access_key"):
        raise ValueError("there are no keys")
    return Keys(
        access_key_id=section["aws_access_key_id"],
        secret_access_key=section["aws_secret_access_key"],
        session_token=section.get("aws_session_token"),
    )


def _of_container(environ: Mapping[str, str]) -> Keys:
    relative = environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    url = f"{_CONTAINER}{relative}" if relative else environ["AWS_CONTAINER_CREDENTIALS_FULL_URI"]
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in _CONTAINER_HOSTS:
        raise PermissionError(
            "AWS_CONTAINER_CREDENTIALS_FULL_URI is not an https address, nor the address of a container endpoint"
        )
    token = environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN", "")
    if named := environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        token = _text_of(named).strip()
    request = urllib.request.Request(url, headers={"Authorization": token} if token else {})
    data = exchange(request, to="its endpoint", timeout_s=_REQUEST_S, max_bytes=_MAX_BYTES)
    return _keys_of(parse_object(data), token="Token")


def _of_instance(environ: Mapping[str, str]) -> Keys:
    """The keys of the role of an EC2 instance.

    Source: "Use the Instance Metadata Service to access instance metadata" in the Amazon EC2 user guide; IMDSv2.
    """
    root = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _INSTANCE
    if urlsplit(root).hostname not in _INSTANCE_HOSTS:
        raise PermissionError("AWS_EC2_METADATA_SERVICE_ENDPOINT is not the address of an instance metadata service")
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        raise PermissionError("AWS_EC2_METADATA_DISABLED is set")

    def ask(path: str, method: str = "GET", **headers: str) -> str:
        url, named = f"{root.rstrip('/')}/latest/{path}", {name.replace("_", "-"): headers[name] for name in headers}
        request = urllib.request.Request(url, headers=named, method=method)
        return exchange(request, to="it", timeout_s=_INSTANCE_S, max_bytes=_MAX_BYTES).decode("utf-8").strip()

    try:
        token = ask("api/token", "PUT", x_aws_ec2_metadata_token_ttl_seconds="21600")
    except OSError as error:
        # This machine is not an instance, or the service of the instance does not answer pods. Another try would not
        # help.
        raise PermissionError("no keys are set, and no metadata service of an instance answers") from error
    path = "meta-data/iam/security-credentials/"
    role = ask(path, x_aws_ec2_metadata_token=token).partition("\n")[0]
    return _keys_of(parse_object(ask(f"{path}{quote(role)}", x_aws_ec2_metadata_token=token).encode()), token="Token")


def _keys_of(found: Mapping[str, Any], *, token: str) -> Keys:
    named = [found.get(name) for name in ("AccessKeyId", "SecretAccessKey", token, "Expiration")]
    if not all(isinstance(text, str) and text for text in named):
        raise ValueError("the answer has no keys")
    key, secret, session, expires = map(str, named)
    return Keys(
        access_key_id=key, secret_access_key=secret, session_token=session, expires_s=clock.parse_utc(expires)
    )
