"""Sends a login token with each request. The token comes from the kubeconfig, from a file, or from a program.

A command may run for hours, and a token expires. So when the cluster refuses a token, the token is read again.
"""

import threading
from collections.abc import Callable, Generator
from functools import partial

import httpx2
from lightkube.core.exceptions import ConfigError

from safepoint.errors import AccessDeniedError, SafepointError
from safepoint.jobs.cluster.connection import Connection
from safepoint.jobs.cluster.login.login_files import read_login_file
from safepoint.jobs.cluster.login.token_program import token_from

_UNAUTHORIZED = 401


class Bearer(httpx2.Auth):
    """Sends a token. If the cluster refuses the token, `read` is called again: the token may have been renewed.

    Several threads can use this object. If the cluster refuses the same token from several threads, only one thread
    calls `read`, because `read` may run a program that asks a person to log in.

    Args:
        what: where the token comes from, for messages.
        read: returns the token. It may raise SafepointError, ConfigError, OSError, KeyError, TypeError or ValueError.
    """

    def __init__(self, what: str, read: Callable[[], str]) -> None:
        self._what, self._read = what, read
        self._token: str | None = None
        self._reading = threading.Lock()

    def sync_auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """See `httpx2.Auth`.

        Raises:
            AccessDeniedError: there is no valid token.
        """
        token = self._token
        if token is not None:
            request.headers["Authorization"] = f"Bearer {token}"
            response = yield request
            if response.status_code != _UNAUTHORIZED:
                return
        request.headers["Authorization"] = f"Bearer {self._instead_of(token)}"
        yield request

    def _instead_of(self, refused: str | None) -> str:
        """The token to use when `refused` is not valid. `refused` is None if no token was used yet."""
        with self._reading:
            if self._token is None or self._token == refused:
                self._token = self._read_valid()
            return self._token

    def _read_valid(self) -> str:
        try:
            return _checked(self._read())
        except (SafepointError, ConfigError, OSError, KeyError, TypeError, ValueError) as error:
            raise AccessDeniedError(
                f"{self._what} failed: {type(error).__name__}: {error}",
                hint="log in to the cluster again, or fix the field `users` in the kubeconfig",
            ) from error


def _checked(token: str) -> str:
    # The token is checked here, because the HTTP library's error for an invalid header would show the token.
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("there is no valid token in it")
    return token


def bearer_of(connection: Connection) -> Bearer | None:
    """The `Bearer` that sends the token of a connection; None if the connection has no token."""
    user, name = connection.config.user, connection.name
    if user is None:
        return None
    if user.token_file is not None:
        return Bearer(f"the file of your token for {name}", partial(_token_in_file, user.token_file))
    if user.token is not None:
        return Bearer(f"your token for {name}", _token_of(user.token, connection.token_now))
    if user.exec is not None:
        return Bearer(f"the program that gives your token for {name}", partial(token_from, user.exec))
    return None


def _token_of(token: str, now: Callable[[], str | None] | None) -> Callable[[], str]:
    """Return a function. Its first call returns `token`. Each later call calls `now`, which takes longer."""
    left = [token]

    def read() -> str:
        if left:
            return left.pop()
        return token if now is None else now() or ""

    return read


def _token_in_file(path: str) -> str:
    return read_login_file(path).decode("ascii", errors="replace").strip()
