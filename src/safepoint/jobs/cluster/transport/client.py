"""Sends HTTP requests to an API server, with limits of time and size, and repeats those that can be repeated."""

import contextlib
import json
import random
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypeVar, cast

import httpx2
from lightkube.config.client_adapter import ConnectionParams, ExecAuth
from lightkube.core.exceptions import ConfigError

from safepoint.errors import AccessDeniedError, SafepointError, StorageError, TransientError, UsageError
from safepoint.foundation import clock
from safepoint.foundation.bounded import Work
from safepoint.jobs.cluster.connection import CORRECT, Connection, missing_files
from safepoint.jobs.cluster.login.token_program import TokenProgram
from safepoint.jobs.cluster.objects import Object
from safepoint.jobs.cluster.transport.failures import BusyError, GoneError, reason_of, refusal, unreachable

_T = TypeVar("_T")
REQUEST_S = 20.0
"""For how long the server may send nothing."""
_CONNECT_S, _CLOSE_S = 5.0, 2.0
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)
_MOST_ANSWER_BYTES = 64 << 20
_MOST_LINE_BYTES = 16 << 20
_EXCHANGE_S = 300.0
"""How long a request and its answer may take, with the program that gives the token, which may ask a person."""
_ANSWER_S = 120.0
"""The time limit for a whole answer. The limit for each read does not stop a server that sends byte after byte."""
_PLAIN = {"accept-encoding": "identity"}


class Client:
    """The connections to one API server. Several threads can use it.

    Args:
        connection: the cluster and the identity.
        within_s: for how long a request is repeated while the server is busy or out of reach.
    """

    def __init__(self, connection: Connection, *, within_s: float) -> None:
        self.connection = connection
        self._within_s = within_s
        timeout = httpx2.Timeout(REQUEST_S, connect=_CONNECT_S)
        is_encrypted = connection.config.cluster.server.startswith("https:")
        try:
            # Without encryption, a proxy could read the requests. The options of this class are of many types.
            parameters: Any = ConnectionParams(timeout=timeout, trust_env=is_encrypted)
            options: Any = parameters.httpx_params(connection.config)
        except (ConfigError, OSError) as error:  # for example, a certificate that cannot be read
            missing = ", ".join(missing_files(connection.config))
            why = f"{missing} does not exist" if missing else error
            raise UsageError(f"the connection to {connection.name} is not valid: {why}", hint=CORRECT) from error
        user = connection.config.user
        if isinstance(options["auth"], ExecAuth) and user is not None and user.exec is not None:
            options["auth"] = TokenProgram(user.exec)  # it does not wait for ever
        self._client = httpx2.Client(**options)
        self._is_closed = False
        self._streams: set[Any] = set()
        self._has_ended = threading.Condition()
        self.num_requests = 0
        """How many requests were sent so far."""

    def close(self) -> None:
        """Close the connections. A thread that reads a stream, or sends a request later, gets StorageError."""
        with self._has_ended:
            self._is_closed = True
            for stream in self._streams:
                with contextlib.suppress(OSError):  # the server has ended it
                    # Not the method of SSLSocket, which changes what the reading thread uses.
                    socket.socket.shutdown(stream.get_extra_info("socket"), socket.SHUT_RDWR)
            # A connection must not be closed while another thread reads from it.
            self._has_ended.wait_for(lambda: not self._streams, _CLOSE_S)
        self._client.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Object:
        """Send a request, and repeat it while the server is busy or out of reach.

        Args:
            method: GET, POST, PATCH or DELETE.
            path: its path.
            query: its parameters.
            body: the object to send as JSON.
            headers: in addition to the usual ones.

        Returns:
            The object in the answer; empty if the answer has none.
        """
        what = f"{method} {path.partition('/namespaces/')[2] or path}"

        def exchange() -> tuple[httpx2.Response, bytes]:
            given = {"content-type": "application/json", "accept": "application/json", **_PLAIN, **(headers or {})}
            content = None if body is None else json.dumps(body).encode()
            with self._client.stream(method, path, params=query, content=content, headers=given) as response:
                return response, _content(response)

        def send() -> Object:
            self.num_requests += 1
            response, data = self._in_time(exchange)
            answer = document(data)
            if response.status_code >= 300:
                raise refusal(response.status_code, answer, what, after_s=response.headers.get("retry-after"))
            return answer

        return self._patiently(send, is_safe=method != "POST")

    def _patiently(self, send: Callable[[], _T], *, is_safe: bool) -> _T:
        """Repeat a request while the server is busy or out of reach.

        Args:
            send: sends the request once.
            is_safe: whether the request may be sent again when its answer was lost.
        """
        begun_s, name = clock.monotonic_s(), self.connection.name
        for shortest_s in (*_PAUSES_S, *[_PAUSES_S[-1]] * 100):
            asked_s = 0.0
            try:
                return send()
            except (ConfigError, KeyError, TypeError, ValueError, FileNotFoundError, PermissionError) as error:
                raise AccessDeniedError(
                    f"the program that gives your token for {name} failed: {type(error).__name__}: {error}",
                    hint="log in to the cluster again, or correct users in the kubeconfig",
                ) from error
            except (httpx2.HTTPError, OSError) as error:
                is_unsent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
                failure = unreachable(name, error)
                if not (is_safe or is_unsent) or "CERTIFICATE" in str(error).upper():
                    raise failure from error
            except GoneError:
                raise
            except TransientError as error:
                failure, asked_s = error, error.pause_s if isinstance(error, BusyError) else 0.0
            pause_s = max(shortest_s, asked_s)
            if clock.monotonic_s() + pause_s - begun_s > self._within_s:
                raise failure
            clock.sleep(pause_s * random.uniform(0.8, 1.2))
        raise AssertionError

    @contextlib.contextmanager
    def upgraded(self, path: str, query: Mapping[str, Any], *, headers: Mapping[str, str]) -> Generator[Any]:
        """The connection after the server has agreed to leave HTTP.

        Args:
            path: the path of the request.
            query: its parameters.
            headers: which ask the server to leave HTTP.
        """
        timeout = httpx2.Timeout(REQUEST_S, connect=_CONNECT_S)
        with self._opened(path, query, timeout=timeout, headers={**_PLAIN, **headers}) as response:
            if response.status_code != 101:
                raise self._refused(response, path)
            yield response.extensions["network_stream"]

    @contextlib.contextmanager
    def lines(self, path: str, query: Mapping[str, str], *, read_s: float | None) -> Generator[Iterator[bytes]]:
        """The lines of an answer that the server continues to write.

        Args:
            path: the path of the request.
            query: its parameters.
            read_s: for how long the server may send nothing; None is without a limit.
        """
        timeout = httpx2.Timeout(REQUEST_S, connect=_CONNECT_S, read=read_s)
        with self._opened(path, query, timeout=timeout, headers=_PLAIN) as response:
            if response.status_code >= 300:
                raise self._refused(response, path)
            yield _lines(response.iter_raw())

    def _refused(self, response: httpx2.Response, path: str) -> SafepointError:
        data = self._in_time(lambda: _content(response))
        return refusal(response.status_code, document(data), f"GET {path}")

    @contextlib.contextmanager
    def _opened(
        self, path: str, query: Mapping[str, Any], *, timeout: httpx2.Timeout, headers: Mapping[str, str]
    ) -> Generator[httpx2.Response]:
        """The answer to a GET, whose body is read by the caller.

        Raises:
            TransientError: the connection broke, also while the caller reads.
        """
        self.num_requests += 1
        request = self._client.stream("GET", path, params=query, timeout=timeout, headers=headers)
        try:
            with contextlib.ExitStack() as stack:
                response = self._in_time(lambda: stack.enter_context(request))
                stack.enter_context(self._registered(response.extensions["network_stream"]))
                yield response
        except (httpx2.HTTPError, OSError) as error:
            raise TransientError(f"the connection to {self.connection.name} broke: {reason_of(error)}") from error

    @contextlib.contextmanager
    def _registered(self, stream: Any) -> Generator[None]:
        """In this context, `close` ends the stream."""
        with self._has_ended:
            if self._is_closed:
                raise self._closed()
            self._streams.add(stream)
        try:
            yield
        finally:
            with self._has_ended:
                self._streams.discard(stream)
                self._has_ended.notify_all()

    def _closed(self) -> StorageError:
        return StorageError(f"the connection to {self.connection.name} was closed")

    def _in_time(self, task: Callable[[], _T]) -> _T:
        """What `task` returns. The timeout for each read is not enough: it begins again with every byte.

        Raises:
            StorageError: `close` was called.
            TransientError: it takes too long.
        """
        if self._is_closed:
            raise self._closed()
        try:
            found = Work(task).result(_EXCHANGE_S)
        except RuntimeError as error:
            if self._is_closed:  # in the meantime
                raise self._closed() from error
            raise
        if found is None:
            raise TransientError(f"cluster {self.connection.name} did not answer within {_EXCHANGE_S:g} s")
        return found


def _content(response: httpx2.Response) -> bytes:
    """The body of an answer, as it was sent: a small compressed body could expand to more than the memory.

    Raises:
        StorageError: the body is too large.
        TransientError: the body takes too long.
    """
    data, give_up_s = bytearray(), clock.monotonic_s() + _ANSWER_S
    for block in response.iter_raw():
        data += block
        if len(data) > _MOST_ANSWER_BYTES:
            raise StorageError(f"the cluster's answer has more than {_MOST_ANSWER_BYTES:,} bytes; it was not read")
        if clock.monotonic_s() > give_up_s:
            raise TransientError(f"the cluster's answer took more than {_ANSWER_S:g} s")
    return bytes(data)


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The lines of a stream. A line that is too long is split into several."""
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
        if len(rest) > _MOST_LINE_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest


def document(data: bytes) -> Object:
    """The JSON object in an answer; empty if the answer is none, such as the HTML page of a proxy."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(data)
        if isinstance(found, dict):
            return cast(Object, found)
    return {}
