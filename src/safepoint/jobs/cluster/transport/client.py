"""Sends HTTP requests to an API server, with limits of time and size, and repeats failed requests if that is safe."""

import contextlib
import json
import random
from collections.abc import Callable, Generator, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx2
from lightkube.config.client_adapter import ConnectionParams
from lightkube.core.exceptions import ConfigError

from safepoint.errors import SafepointError, StorageError, TransientError, UsageError
from safepoint.foundation import clock
from safepoint.foundation.bounded import Work
from safepoint.foundation.bounded_json import has_more_values, parse_object
from safepoint.jobs.cluster.connection import CORRECT, Connection, missing_files
from safepoint.jobs.cluster.login.bearer import bearer_of
from safepoint.jobs.cluster.login.login_files import add_certificate, without_files
from safepoint.jobs.cluster.objects import Object, size_of_json
from safepoint.jobs.cluster.transport.failures import (
    BusyError,
    GoneError,
    RejectedError,
    TooMuchError,
    reason_of,
    refusal,
    unreachable,
)
from safepoint.jobs.cluster.transport.open_streams import OpenStreams

_T = TypeVar("_T")
REQUEST_S = 20.0
"""For how long the server may send nothing."""
_CONNECT_S, _CLOSE_S = 5.0, 2.0
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)
_MOST_ANSWER_BYTES = 64 << 20
_MOST_LINE_BYTES = 1 << 20
_MOST_VALUES = 1 << 20
"""The limit of JSON values in one answer, or in one event of a watch.

Parsed values take more memory than their text: an answer of 64 MiB could have 20,000,000 empty objects, which take
1.5 GB. A page of a list has at most 500 objects, and a large pod has about 1,000 values.
"""
_EXCHANGE_S = 300.0
"""How long a request and its answer may take. This includes the login program, which may wait for a person."""
_ANSWER_S = 120.0
"""The time limit for a whole answer. The limit for each read does not stop a server that sends byte after byte."""
_PLAIN = {"accept-encoding": "identity"}


class Budget:
    """A limit for the total size of several answers.

    Args:
        most_bytes: the limit in bytes.
        what: what the answers contain, for the message.
    """

    def __init__(self, most_bytes: int, what: str) -> None:
        self._left_bytes, self._most_bytes, self._what = most_bytes, most_bytes, what

    def take(self, answer: bytes) -> None:
        """Count an answer; see `size_of_json`.

        Raises:
            TooMuchError: there are more bytes than the limit.
        """
        self._left_bytes -= size_of_json(answer)
        if self._left_bytes < 0:
            raise TooMuchError(f"{self._what} have more than {self._most_bytes:,} bytes; nothing was done")


class Client:
    """The connections to one API server. Several threads can use it.

    Args:
        connection: the cluster and the identity.
        within_s: how long a request is repeated while the server is busy or out of reach.
    """

    def __init__(self, connection: Connection, *, within_s: float) -> None:
        self.connection = connection
        self._within_s = within_s
        timeout = httpx2.Timeout(REQUEST_S, connect=_CONNECT_S)
        is_encrypted = connection.config.cluster.server.startswith("https:")
        try:
            # A proxy in the environment is used only for encrypted requests, because a proxy could read unencrypted
            # requests.
            parameters: Any = ConnectionParams(timeout=timeout, trust_env=is_encrypted)
            config = without_files(connection.config)
            options: Any = parameters.httpx_params(config)
            add_certificate(options["verify"], connection.config)
        except (ConfigError, OSError, ValueError) as error:  # for example, a certificate that cannot be read
            missing = ", ".join(missing_files(connection.config))
            why = f"{missing} does not exist" if missing else error
            raise UsageError(f"the connection to {connection.name} is not valid: {why}", hint=CORRECT) from error
        options["auth"] = bearer_of(connection) or options["auth"]
        try:
            self._client = httpx2.Client(**options)
        except (ValueError, ImportError, httpx2.InvalidURL):  # the error may quote the password of the proxy
            raise UsageError(
                f"the connection to {connection.name} cannot be made: the address of the cluster or of the proxy "
                "(HTTPS_PROXY, ALL_PROXY) is not supported",
                hint="set HTTPS_PROXY to http://HOST:PORT",
            ) from None
        self._streams = OpenStreams()
        self.num_requests = 0
        """How many requests were sent so far."""
        self._ahead_s = 0.0

    @property
    def now_s(self) -> float:
        """The API server's time, in seconds since 1970. Before the first answer, it is the time of this machine."""
        return clock.wall_s() + self._ahead_s

    def _note_time(self, date: str | None) -> None:
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            self._ahead_s = parsedate_to_datetime(date or "").timestamp() - clock.wall_s()

    def close(self) -> None:
        """Close the connections. A thread that uses a connection, or sends a request later, gets StorageError."""
        # A connection must not be closed while another thread reads from it.
        self._streams.close(within_s=_CLOSE_S)
        self._client.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        headers: Mapping[str, str] | None = None,
        budget: Budget | None = None,
        is_safe: bool | None = None,
    ) -> Object:
        """Send a request, and repeat it while the server is busy or out of reach.

        A request that is not safe is repeated only if the server was not reached, or has rejected the request: in
        both cases, it was not carried out.

        Args:
            method: GET, POST, PATCH or DELETE.
            path: its path.
            query: its parameters.
            body: the object to send as JSON.
            headers: additional headers.
            budget: the limit for the total size of this answer and the other answers with the same budget; None for
                no limit.
            is_safe: whether the request may be carried out twice. None means True for all methods except POST.

        Returns:
            The object in the answer; empty if the answer has no object.
        """
        what = f"{method} {path.partition('/namespaces/')[2] or path}"

        def exchange() -> tuple[httpx2.Response, bytes]:
            given = {"content-type": "application/json", "accept": "application/json", **_PLAIN, **(headers or {})}
            content = None if body is None else json.dumps(body).encode()
            with (
                self._streams.used(),
                self._client.stream(
                    method, path, params=query, content=content, headers=given, extensions=self._extensions
                ) as response,
            ):
                return response, _content(response)

        def send() -> Object:
            self.num_requests += 1
            response, data = self._in_time(exchange)
            self._note_time(response.headers.get("date"))
            if budget is not None:
                budget.take(data)
            answer = document(data)
            if response.status_code >= 300:
                raise refusal(response.status_code, answer, what, after_s=response.headers.get("retry-after"))
            return answer

        return self._patiently(send, is_safe=method != "POST" if is_safe is None else is_safe)

    def _patiently(self, send: Callable[[], _T], *, is_safe: bool) -> _T:
        """Repeat a request while the server is busy or out of reach.

        Args:
            send: sends the request once.
            is_safe: whether a request that the server may have carried out may be sent again.
        """
        begun_s, name = clock.monotonic_s(), self.connection.name
        for shortest_s in (*_PAUSES_S, *[_PAUSES_S[-1]] * 100):
            asked_s = 0.0
            try:
                return send()
            except (httpx2.HTTPError, OSError) as error:
                is_unsent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
                failure = unreachable(name, error)
                if not (is_safe or is_unsent) or "CERTIFICATE" in str(error).upper():
                    raise failure from error
            except GoneError:
                raise
            except TransientError as error:
                if not is_safe and not isinstance(error, RejectedError):
                    raise
                failure, asked_s = error, error.pause_s if isinstance(error, BusyError) else 0.0
            pause_s = max(shortest_s, asked_s)
            if clock.monotonic_s() + pause_s - begun_s > self._within_s:
                raise failure
            clock.sleep(pause_s * random.uniform(0.8, 1.2))
        raise AssertionError

    @contextlib.contextmanager
    def upgraded(self, path: str, query: Mapping[str, Any], *, headers: Mapping[str, str]) -> Generator[Any]:
        """The connection after the server has agreed to change from HTTP to another protocol.

        Args:
            path: the path of the request.
            query: its parameters.
            headers: the headers that ask the server for the other protocol.
        """
        timeout = httpx2.Timeout(REQUEST_S, connect=_CONNECT_S)
        with self._opened(path, query, timeout=timeout, headers={**_PLAIN, **headers}) as response:
            if response.status_code != 101:
                raise self._refused(response, path)
            yield response.extensions["network_stream"]

    @contextlib.contextmanager
    def lines(
        self, path: str, query: Mapping[str, str], *, read_s: float | None, most_line_bytes: int | None = None
    ) -> Generator[Iterator[bytes]]:
        """The lines of an answer that the server continues to write.

        Args:
            path: the path of the request.
            query: its parameters.
            read_s: how long the server may send nothing; None for no limit.
            most_line_bytes: longer lines are split; None for 1 MiB.
        """
        timeout = httpx2.Timeout(REQUEST_S, connect=_CONNECT_S, read=read_s)
        with self._opened(path, query, timeout=timeout, headers=_PLAIN) as response:
            if response.status_code >= 300:
                raise self._refused(response, path)
            yield _lines(response.iter_raw(), _MOST_LINE_BYTES if most_line_bytes is None else most_line_bytes)

    def _refused(self, response: httpx2.Response, path: str) -> SafepointError:
        data = self._in_time(lambda: _content(response))
        return refusal(response.status_code, document(data), f"GET {path}")

    @contextlib.contextmanager
    def _opened(
        self, path: str, query: Mapping[str, Any], *, timeout: httpx2.Timeout, headers: Mapping[str, str]
    ) -> Generator[httpx2.Response]:
        """The answer to a GET. The caller reads its body.

        Raises:
            StorageError: `close` was called, before or while the caller reads.
            TransientError: the connection broke, before or while the caller reads.
        """
        self.num_requests += 1
        request = self._client.stream(
            "GET", path, params=query, timeout=timeout, headers=headers, extensions=self._extensions
        )
        try:
            with self._streams.used(), contextlib.ExitStack() as stack:
                yield self._in_time(lambda: stack.enter_context(request))
            is_closed = self._streams.is_closed
        except Exception as error:
            if self._streams.is_closed:
                raise self._closed() from error
            if isinstance(error, httpx2.HTTPError | OSError):
                raise TransientError(f"the connection to {self.connection.name} broke: {reason_of(error)}") from error
            raise
        if is_closed:  # `close` may have cut off the body; a body without Content-Length would look complete
            raise self._closed()

    @property
    def _extensions(self) -> dict[str, Any]:
        return {"trace": self._streams.trace}

    def _closed(self) -> StorageError:
        return StorageError(f"the connection to {self.connection.name} was closed")

    def _in_time(self, task: Callable[[], _T]) -> _T:
        """Run `task`, and return its result. The timeout for reads is not enough: it begins again with every byte.

        Raises:
            StorageError: `close` was called.
            TransientError: the task takes too long.
        """
        if self._streams.is_closed:
            raise self._closed()
        try:
            found = Work(task).result(_EXCHANGE_S, unless=self._streams.closing)
        except Exception as error:
            if self._streams.is_closed:  # `close` was called while the task ran
                raise self._closed() from error
            raise
        if self._streams.is_closed:  # see `_opened`: the answer may have been cut off
            raise self._closed()
        if found is not None:
            return found
        # End all streams, because it is unknown which stream the task uses. Later requests open new streams.
        self._streams.end()
        raise TransientError(f"cluster {self.connection.name} did not answer within {_EXCHANGE_S:g} s")


def _content(response: httpx2.Response) -> bytes:
    """The body of an answer, not decompressed: a small compressed body could expand to more than the memory.

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


def _lines(blocks: Iterator[bytes], most_bytes: int) -> Iterator[bytes]:
    """The lines of a stream. A line that is too long is split into several lines, but not within a character."""
    rest = bytearray()
    for block in blocks:
        rest += block
        if b"\n" in block:
            *lines, last = rest.split(b"\n")
            yield from map(bytes, lines)
            rest = last
        if len(rest) > most_bytes:
            end = _last_character(rest)
            yield bytes(rest[:end])
            del rest[:end]
    if rest:
        yield bytes(rest)


def _last_character(text: bytearray) -> int:
    """Where the last character of a text in UTF-8 begins, which may not be complete."""
    begins = (place for place in range(len(text) - 1, max(0, len(text) - 4), -1) if text[place] & 0xC0 != 0x80)
    return next(begins, len(text))


def document(data: bytes) -> Object:
    """The JSON object in an answer; empty if the answer is no JSON object, such as the HTML page of a proxy.

    Raises:
        TooMuchError: the answer has too many values.
    """
    if len(data) > _MOST_VALUES and has_more_values(data, _MOST_VALUES):
        raise TooMuchError(f"the cluster's answer has more than {_MOST_VALUES:,} values; it was not read")
    with contextlib.suppress(ValueError):
        return parse_object(data, max_bytes=_MOST_ANSWER_BYTES, max_values=_MOST_VALUES)
    return {}
