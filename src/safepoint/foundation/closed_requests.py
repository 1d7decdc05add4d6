"""HTTP requests that carry a secret. They follow no redirect, and pass a proxy only in an encrypted tunnel.

Each request ends within its time limit, even if the server sends one byte a second, or TLS records without data.
Only the look-up of the server's name has no limit but that of the system.
"""

import contextlib
import functools
import http.client
import io
import os
import socket
import ssl
import sys
import threading
import urllib.error
import urllib.request
from typing import Any, Self, cast
from urllib.parse import urlsplit

from safepoint.foundation import clock

_LINGER_S = 1.0
"""How often the thread of all time limits looks whether it is still needed."""


def named_proxy(url: str) -> str | None:
    """The proxy for an https request, exactly as an environment variable states it.

    None if the environment names no proxy, or excludes the host of `url`.
    """
    if urllib.request.proxy_bypass(urlsplit(url).hostname or ""):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get("https") or proxies.get("all")


def tunnel_proxy(url: str) -> str | None:
    """The URL of the proxy for an https request; None if `named_proxy` finds no proxy.

    Raises:
        OSError: the address of the proxy is invalid, or has a scheme other than `http`. With `https`, a user
            expects an encrypted connection to the proxy, which `http.client` does not make.
    """
    proxy = named_proxy(url)
    if not proxy:
        return None
    scheme, has_scheme, _ = proxy.partition("://")
    if has_scheme and scheme.lower() != "http":
        raise OSError(
            f"the proxy of HTTPS_PROXY or ALL_PROXY begins with {scheme[:20]}://; only http:// is supported"
        )
    proxy = proxy if has_scheme else f"http://{proxy}"
    try:
        urlsplit(proxy).port  # noqa: B018  it raises if the port is not a number
    except ValueError:
        raise OSError("the proxy of HTTPS_PROXY or ALL_PROXY is not a valid address") from None
    return proxy


def exchange(
    request: urllib.request.Request,
    *,
    to: str,
    timeout_s: float,
    max_bytes: int | None,
    context: ssl.SSLContext | None = None,
) -> bytes:
    """Send a request, and return the body of the response.

    Args:
        request: the request.
        to: the server's name in messages.
        timeout_s: how long the request and its whole response may take.
        max_bytes: the limit of the bytes of the body. None: the body is not read, and the result is empty.
        context: which certificates are trusted; None for the system's.

    Raises:
        PermissionError: the server refused the request, with a status from 400 to 499 other than 408 and 429.
        OSError: there is no response with a status from 200 to 299, or its body is longer than `max_bytes`, or the
            connection ended before the end of the body. The message shows nothing of the request.
    """
    # An https request passes through a proxy in an encrypted tunnel. An http request must not use a proxy, which
    # could read it.
    proxy = tunnel_proxy(request.full_url) if request.type == "https" else None
    proxies = urllib.request.ProxyHandler({"https": proxy} if proxy else {})
    with TimeLimit(clock.monotonic_s() + timeout_s) as limit:
        opener = urllib.request.build_opener(
            proxies, _TimedHandler(limit), _TimedTlsHandler(limit, context), _NoRedirects()
        )
        return _answer(opener, request, to, timeout_s, max_bytes)


def _answer(
    opener: urllib.request.OpenerDirector,
    request: urllib.request.Request,
    to: str,
    timeout_s: float,
    max_bytes: int | None,
) -> bytes:
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return b"" if max_bytes is None else _body(answer, to, max_bytes)
    except urllib.error.HTTPError as error:
        with error:
            is_refusal = 400 <= error.code < 500 and error.code not in {408, 429}
            raise (PermissionError if is_refusal else OSError)(
                f"{to} answered with HTTP status {error.code}"
            ) from None
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"the request is invalid or the answer of {to} is not HTTP: {type(error).__name__}") from None


def _body(answer: http.client.HTTPResponse, to: str, max_bytes: int) -> bytes:
    data = answer.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(f"the answer of {to} has more than {max_bytes} bytes")
    # With a number of bytes, `HTTPResponse.read` raises no error if the connection ends before the end of the body.
    if answer.length:
        raise OSError(f"the connection to {to} ended before the end of its answer")
    return data


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send the secret to another address."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


class _TimedHandler(urllib.request.HTTPHandler):
    def __init__(self, limit: "TimeLimit") -> None:
        super().__init__()
        self._limit = limit

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_timed(http.client.HTTPConnection, self._limit), req)


class _TimedTlsHandler(urllib.request.HTTPSHandler):
    def __init__(self, limit: "TimeLimit", context: ssl.SSLContext | None) -> None:
        super().__init__()
        self._limit = limit
        self._tls = context

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_timed(http.client.HTTPSConnection, self._limit, context=self._tls), req)


def _timed(kind: type[http.client.HTTPConnection], limit: "TimeLimit", **options: Any) -> Any:
    """A function that makes connections. Each response on such a connection must be complete within the limit."""

    def make(*args: Any, **kwargs: Any) -> http.client.HTTPConnection:
        connection = kind(*args, **kwargs, **options)
        connection.response_class = cast("Any", functools.partial(TimedResponse, until_s=limit.until_s))
        limit_connecting(connection, limit)
        return connection

    return make


class TimeLimit:
    """A context in which a request's connections are shut down when its time is over, even in the middle of a call.

    A check before each call, and the timeout of the socket, are not enough. OpenSSL processes records without data,
    such as session tickets, inside of one call. While a server sends them without end, the call does not return.

    Args:
        until_s: the time, by the monotonic clock.

    Raises:
        TimeoutError: at the end of the context, if the connections were shut down; also if the answer looks complete,
            because an answer without a stated length ends with its connection. An error that is neither an OSError
            nor from `http.client` stays as it is.
    """

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.has_passed = False
        """Whether the connections were shut down."""
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []

    def watch(self, connection: socket.socket) -> None:
        """Shut `connection` down when the time is over."""
        # The descriptor is a copy: `SSLContext.wrap_socket` takes the original one away from the socket, and the
        # number of a closed descriptor may soon belong to another file.
        copy = socket.socket(connection.family, connection.type, connection.proto, os.dup(connection.fileno()))
        with self._lock:
            self._sockets.append(copy)
        if self.has_passed:
            self.end()

    def end(self) -> None:
        """Shut the connections down. A call that reads or writes in another thread fails, or finds the end."""
        with self._lock:
            self.has_passed = True
            for one in self._sockets:
                with contextlib.suppress(OSError):  # the server has closed the connection
                    one.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        _watch.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        _watch.remove(self)
        with self._lock:
            while self._sockets:
                self._sockets.pop().close()
        if self.has_passed and (error is None or isinstance(error, OSError | http.client.HTTPException)):
            raise TimeoutError("timed out: the request took too long") from error


class _Watch:
    """The thread that ends all requests of this process in time. It ends when it has nothing to do."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._limits: set[TimeLimit] = set()
        self._is_running = False
        self._wakes_s = 0.0

    def add(self, limit: TimeLimit) -> None:
        with self._changed:
            self._limits.add(limit)
            if not self._is_running:
                # Without a thread, the timeout of the socket still limits the request. There is none if the machine
                # has too many threads, or if the interpreter ends.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=self._run, name="safepoint-time-limits", daemon=True).start()
                    self._is_running = True
            elif limit.until_s < self._wakes_s:
                self._changed.notify()

    def remove(self, limit: TimeLimit) -> None:
        with self._changed:
            self._limits.discard(limit)

    def _run(self) -> None:
        with self._changed:
            while self._limits:
                now_s = clock.monotonic_s()
                for limit in [one for one in self._limits if one.until_s <= now_s]:
                    self._limits.discard(limit)
                    limit.end()
                # The thread looks often enough to end soon after the last request.
                left_s = min((one.until_s - now_s for one in self._limits), default=_LINGER_S)
                self._wakes_s = now_s + min(left_s, _LINGER_S)
                self._changed.wait(self._wakes_s - now_s)
            self._is_running = False


_watch = _Watch()


def _renew_watch() -> None:
    global _watch  # noqa: PLW0603  a forked process has neither the thread nor the requests of its parent
    _watch = _Watch()


os.register_at_fork(after_in_child=_renew_watch)


def limit_connecting(connection: http.client.HTTPConnection, limit: TimeLimit) -> None:
    """Make `connection` stop connecting when the time of `limit` is over, however many addresses the server has.

    `socket.create_connection` would wait for the whole timeout at each of these addresses. `limit` then watches the
    connection, also during the handshake.
    """
    cast("Any", connection)._create_connection = functools.partial(_connect, limit)


def _connect(limit: TimeLimit, address: tuple[str, int], timeout_s: float, *others: Any) -> socket.socket:
    """Connect to the first address that answers. Each address gets an equal share of the time that is left."""
    del others  # the address to bind, which is not used
    host, port = address
    places = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM)
    failure: OSError = TimeoutError("timed out")
    for number, (family, kind, protocol, _, place) in enumerate(places):
        left_s = limit.until_s - clock.monotonic_s()
        if left_s <= 0:
            break
        try:
            connected = socket.socket(family, kind, protocol)
        except OSError as error:  # such as IPv6 that is switched off
            failure = error
            continue
        try:
            connected.settimeout(left_s / (len(places) - number))
            connected.connect(place)
            connected.settimeout(timeout_s)
            limit.watch(connected)
        except OSError as error:
            failure = error
            connected.close()
        else:
            return connected
    raise failure


class TimedResponse(http.client.HTTPResponse):
    """A response whose status, headers and body must arrive before a given time.

    The timeout of a socket alone is not enough, because it begins again with every byte. A server that sends one byte
    a second never exceeds this timeout.

    Args:
        sock: the connection, with a timeout.
        until_s: the time, by the monotonic clock.
        args: see `http.client.HTTPResponse`.
        kwargs: see `http.client.HTTPResponse`.

    Raises:
        TimeoutError: in every method that reads, after `until_s`.
    """

    def __init__(self, sock: Any, *args: Any, until_s: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = _BoundedReader(cast("io.RawIOBase", _Reader(cast("Any", self.fp).detach(), sock, until_s)))


class _BoundedReader(io.BufferedReader):
    """Refuses to read up to the end, because the response may have no end.

    If a server states -1 as the size of a chunk, `http.client` would read up to the end.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            raise http.client.IncompleteRead(b"")
        return super().read(size)


def _acknowledge(connection: socket.socket) -> None:
    """Acknowledge what has arrived.

    Some servers, among them Ceph RGW, send the headers, wait for the acknowledgement, and only then send the body.
    Without this call, Linux acknowledges the headers only after 40 ms.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the server has closed the connection, or it is not TCP
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


class _Reader(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, sock: Any, until_s: float) -> None:
        self._raw = raw
        self._socket = sock
        self._until_s = until_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        left_s = self._until_s - clock.monotonic_s()
        if left_s <= 0:
            raise TimeoutError("the answer took too long")
        if left_s < self._socket.gettimeout():
            self._socket.settimeout(left_s)
        _acknowledge(self._socket)
        return cast("int | None", self._raw.readinto(buffer))  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        self._raw.close()
        super().close()
