"""The files that a kubeconfig names for the login: certificates, the key and the token.

A kubeconfig may come from another person. So only regular files up to a size limit are read: reading a pipe or a
device might never end. Safepoint never asks for the password of a key.
"""

import base64
import contextlib
import copy
import os
import ssl
from collections.abc import Generator
from typing import NoReturn

from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError

from safepoint.foundation.shared_folders.ownership import open_trusted

_MOST_BYTES = 4 << 20
"""The size limit of a file. The file with all certificate authorities of a Linux machine usually has about 0.2 MB."""


def read_login_file(path: str) -> bytes:
    """The content of a file.

    Raises:
        ConfigError: the path is relative, or the file is too large.
        OSError: the file cannot be read, is not a regular file, or another user may have written it (see
            `open_trusted`).
    """
    if not os.path.isabs(path):
        raise ConfigError(f"the path {path} is relative to an unknown folder; use an absolute path")
    with open_trusted(path) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path} has more than {_MOST_BYTES:,} bytes; it was not used")
    return data


def without_files(config: SingleConfig) -> SingleConfig:
    """A copy of the configuration. It contains the content of the authority's certificate file, not the path of this
    file. It does not contain the client's certificate and key.

    As in kubectl, content in the kubeconfig takes precedence over a file.
    """
    cluster, user = copy.copy(config.cluster), copy.copy(config.user)
    if cluster.certificate_auth and not cluster.certificate_auth_data:
        cluster.certificate_auth_data = base64.b64encode(read_login_file(cluster.certificate_auth)).decode()
    cluster.certificate_auth = None
    if user is not None:
        user.client_cert = user.client_cert_data = user.client_key = user.client_key_data = None
    return config._replace(cluster=cluster, user=user)


def add_certificate(context: ssl.SSLContext, config: SingleConfig) -> None:
    """Make `context` send the client's certificate to the server, if the kubeconfig has a certificate.

    Raises:
        ConfigError: the key is missing or encrypted, or a file is too large.
        OSError: a file cannot be read, or is not a certificate.
    """
    user = config.user
    if user is None or not (user.client_cert or user.client_cert_data):
        return
    with _in_memory(_content(user, "client_cert")) as certificate, _in_memory(_content(user, "client_key")) as key:
        context.load_cert_chain(certificate, key, password=_refuse_password)


@contextlib.contextmanager
def _in_memory(data: bytes) -> Generator[str]:
    """Yield the path of a file in memory with this content. OpenSSL needs a path: it reads a certificate only from a
    file.

    The content may be a private key. A file in memory has no name that another user could replace or open.
    """
    with os.fdopen(os.memfd_create("safepoint-login", os.MFD_CLOEXEC), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _content(user: User, name: str) -> bytes:
    data, path = getattr(user, f"{name}_data"), getattr(user, name)
    if data:
        return base64.b64decode(data)
    if not path:
        raise ConfigError(f"{name.replace('_', '-')} is missing")
    return read_login_file(path)


def _refuse_password() -> NoReturn:
    raise ConfigError("the client's key is encrypted")
