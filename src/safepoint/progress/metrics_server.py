"""Serves the progress of the run over HTTP: to OpenShift AI's controller as JSON, to Prometheus as text.

`/metrics` returns the controller's JSON. If the client prefers text, as Prometheus does, `/metrics` returns text.
`/metrics/prometheus` always returns text. Before the first record the status is 503, so that the controller keeps the
previous values. No request changes anything.
"""

import contextlib
import errno
import http.client
import http.server
import io
import os
import socket
import socketserver
import threading
from collections.abc import Mapping
from typing import Any, cast

from safepoint.foundation import clock
from safepoint.progress import prometheus_text
from safepoint.progress.trainer_status import ReadStatus, TrainerStatus

_JSON, _TEXTS = "application/json", ("text/plain", "application/openmetrics-text")
_REQUEST_S = 5.0
"""The time limit of a whole request, even if the request arrives slowly."""
_MOST_REQUEST_BYTES = 32 << 10
"""The limit for the request line and all headers of a request. Without it, `http.server` would read 100 lines of
64 KiB. Prometheus sends less than 1 KiB, and a token or what a mesh of services adds is a few KiB long."""
_MAX_CONNECTIONS = 32
_PAUSE_S = 0.1
_EVERYWHERE = {"", "0.0.0.0", "::", "*"}


class MetricsServer:
    """Serves from a thread of its own until it is closed.

    Args:
        read_status: called at each request.
        host: an address; the empty string, `*`, `0.0.0.0` and `::` stand for all addresses of the machine.
        port: the port; 0 for any free port.

    Raises:
        OSError: the port is taken, or the address does not belong to this machine.
    """

    def __init__(self, read_status: ReadStatus, *, host: str, port: int) -> None:
        self._server = _listen(type("_Bound", (_Handler,), {"read_status": staticmethod(read_status)}), host, port)
        self.port: int = self._server.server_address[1]
        """The port that the server listens on."""
        threading.Thread(target=self._server.serve_forever, name="safepoint-metrics", daemon=True).start()

    def close(self) -> None:
        """Free the port, without waiting for running requests."""
        self._server.shutdown()
        self._server.server_close()


def default_host(environ: Mapping[str, str] | None = None) -> str:
    """The default `host`: all addresses in a pod, because the controller is in another pod; elsewhere 127.0.0.1."""
    environ = os.environ if environ is None else environ
    return "" if environ.get("KUBERNETES_SERVICE_HOST") else "127.0.0.1"


class _Server(http.server.ThreadingHTTPServer):
    """An HTTP server that bounds its connections.

    If there are more than `_MAX_CONNECTIONS`, the oldest connections are interrupted. Each connection that lasts
    longer than `_REQUEST_S` is interrupted too.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: "type[_Handler]") -> None:
        self._connections: dict[socket.socket, float] = {}  # connection → when it has to end; the oldest is first
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            clock.sleep(_PAUSE_S)  # if no file descriptor is free, `accept` would fail again at once
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        # An interrupted connection is counted until its thread has closed it, so there may be more connections than
        # the limit.
        if len(self._connections) >= 2 * _MAX_CONNECTIONS:
            super().shutdown_request(request)
            return
        self._connections[request] = clock.monotonic_s() + _REQUEST_S
        for connection in list(self._connections)[:-_MAX_CONNECTIONS]:
            _interrupt(connection)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Interrupt connections that are too old. The base class calls this at least twice a second."""
        now_s = clock.monotonic_s()
        for connection, until_s in list(self._connections.items()):
            if until_s < now_s:
                _interrupt(connection)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6 and self.server_address[0] == "::":
            # Accept IPv4 on this socket too: a pod may have only an IPv4 address.
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)  # HTTPServer.server_bind would wait for a name server
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of a request. Most errors come from clients that have disconnected."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(http.server.BaseHTTPRequestHandler):
    read_status: ReadStatus
    timeout = _REQUEST_S
    server_version = "safepoint"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = _RequestReader(cast("Any", self.rfile).detach())

    def do_GET(self) -> None:
        known = self.read_status()
        path = self.path.partition("?")[0].rstrip("/")
        if path not in {"/metrics", "/metrics/prometheus"}:
            self._answer(404, _JSON, b'{"error": "use /metrics or /metrics/prometheus"}')
        elif known is None:
            self._answer(503, _JSON, b'{"error": "training has not begun"}')
        elif path == "/metrics/prometheus" or wants_text(self.headers.get("Accept", "")):
            text = prometheus_text.render(known[0], now_s=clock.wall_s())
            self._answer(200, prometheus_text.CONTENT_TYPE, text.encode(errors="backslashreplace"))
        else:
            self._answer(200, _JSON, TrainerStatus.of(known[0], has_ended=known[1]).to_bytes())

    do_HEAD = do_GET  # noqa: N815  its name is the base class's

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name is the base class's
        """Write no log of requests."""


class _RequestReader(io.BufferedReader):
    """Reads the lines of one request, with a limit for all of them together."""

    _left_bytes = _MOST_REQUEST_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(self._left_bytes + 1)
        self._left_bytes -= len(line)
        if self._left_bytes < 0:
            raise http.client.LineTooLong("request")  # in a header, `http.server` answers with status 431
        return line


def _interrupt(connection: socket.socket) -> None:
    """Shut the connection down, so that the thread that serves it ends."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def wants_text(accept: str) -> bool:
    """Whether a client with this Accept header prefers Prometheus' text to JSON."""
    weights: dict[str, float] = {}
    for part in accept.split(","):
        kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    weight = float(parameter[2:])
                except ValueError:
                    weight = 0.0
        weights[kind] = max(weight, weights.get(kind, 0.0))
    return max(weights.get(kind, 0.0) for kind in _TEXTS) > weights.get(_JSON, 0.0)


def _listen(handler: type[_Handler], host: str, port: int) -> _Server:
    if host in _EVERYWHERE:
        try:
            return _Server6(("::", port), handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            return _Server(("0.0.0.0", port), handler)  # this kernel has no IPv6
    return (_Server6 if ":" in host else _Server)((host, port), handler)
