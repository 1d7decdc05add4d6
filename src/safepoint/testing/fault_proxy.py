"""A proxy on loopback between a client and an S3 server. The proxy injects the requested faults.

    with FaultProxy("127.0.0.1:9000", seed=1) as proxy:
        proxy.add(Fault(kind=Kind.STATUS, status=503, probability=0.05))
        ...                                  # AWS_ENDPOINT_URL_S3 = proxy.endpoint
        print(proxy.injected)

    python -m safepoint.testing.fault_proxy --upstream 127.0.0.1:9000 --error-rate 0.05 --delay-ms 20

S3 signatures cover the Host header, so the proxy forwards this header unchanged. The proxy supports plain HTTP only.
"""

import argparse
import contextlib
import enum
import http.client
import http.server
import io
import random
import signal
import socket
import socketserver
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

_BLOCK_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 16
_HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}


class Kind(enum.StrEnum):
    """The kinds of faults."""

    STATUS = "status"
    """The proxy reads the request, does not forward it, and answers with `Fault.status` and an error in S3's XML."""
    RESET_BEFORE_BODY = "reset-before-body"
    """The proxy resets the connection when the request's headers have arrived. It does not forward the request."""
    RESET_AFTER_BODY = "reset-after-body"
    """The proxy resets the connection when the whole request has arrived. It does not forward the request."""
    LOST_ANSWER = "lost-answer"
    """The server executes the request. The proxy resets the connection and sends no answer."""
    TRUNCATED = "truncated"
    """The proxy sends half of the answer's body, then closes the connection."""
    WRONG_LENGTH = "wrong-length"
    """The answer's `Content-Length` is seven bytes more than the length of its body."""
    CUT_LIST = "cut-list"
    """The proxy sends half of the answer's body, with a `Content-Length` that matches. The XML of a listing ends
    early."""
    FLIPPED = "flipped"
    """One bit of the request's body is changed on the way to the server."""
    STALL = "stall"
    """The proxy waits for `Fault.seconds` before it sends the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way to break some requests.

    Args:
        kind: what breaks.
        method: break only requests with this HTTP method; None for all methods.
        contains: break only requests whose path and query contain this text.
        nth: break only the n-th of the requests that `method` and `contains` select, counted from 1; None for all.
        probability: the probability that a selected request breaks, from 0 to 1.
        status: for `Kind.STATUS`, the HTTP status of the answer.
        seconds: for `Kind.STALL`, how long the proxy waits.
    """

    kind: Kind
    method: str | None = None
    contains: str = ""
    nth: int | None = None
    probability: float = 1.0
    status: int = 503
    seconds: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability {self.probability} must be between 0 and 1")
        if self.nth is not None and self.nth < 1:
            raise ValueError(f"nth {self.nth} must be at least 1")


class FaultProxy:
    """The proxy; a context manager.

    Args:
        upstream: `host:port` of the server.
        seed: the seed of the random numbers for `Fault.probability`.
        delay_s: how long to wait before each request is forwarded.
        bytes_per_s: the limit for the bodies in each direction, for all connections together; None for no limit.
        port: the port of the proxy; 0 for any free port.
    """

    def __init__(
        self,
        upstream: str,
        *,
        seed: int = 0,
        delay_s: float = 0.0,
        bytes_per_s: float | None = None,
        port: int = 0,
    ) -> None:
        host, _, upstream_port = upstream.rpartition(":")
        self.upstream = (host, int(upstream_port))
        self.delay_s = delay_s
        self.requests = Counter[str]()
        """Requests seen, by method."""
        self.injected = Counter[Kind]()
        """Faults injected, by kind."""
        self.expired: set[str] = set()
        """The proxy refuses requests that use one of these session tokens or access keys, with the error
        ExpiredToken."""
        self._faults: list[Fault] = []
        self._matched = Counter[int]()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.up = _Throttle(bytes_per_s)
        self.down = _Throttle(bytes_per_s)
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.proxy = self
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        """The URL for the client to use instead of the server's URL."""
        return f"http://127.0.0.1:{self.port}"

    def add(self, fault: Fault) -> None:
        """Inject `fault` from now on. If several faults apply to a request, the fault added first is used."""
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """Remove all faults. Later requests are forwarded unchanged."""
        with self._lock:
            self._faults.clear()
            self._matched.clear()

    def choose(self, method: str, target: str) -> Fault | None:
        """Count a request, and choose the fault for it; None for no fault."""
        with self._lock:
            self.requests[method] += 1
            for index, fault in enumerate(self._faults):
                if fault.method not in {None, method} or fault.contains not in target:
                    continue
                self._matched[index] += 1
                if fault.nth not in {None, self._matched[index]} or self._random.random() >= fault.probability:
                    continue
                self.injected[fault.kind] += 1
                return fault
            return None

    def __enter__(self) -> "FaultProxy":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Throttle:
    """Limits the rate of bytes over all connections."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def wait_for(self, num_bytes: int) -> None:
        if self._bytes_per_s is None:
            return
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s) + num_bytes / self._bytes_per_s
            wait_s = self._free_s - now_s
        time.sleep(wait_s)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128
    proxy: FaultProxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that disconnect, because the faults of this proxy make them disconnect."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """Forwards the requests of one connection."""

    protocol_version = "HTTP/1.1"
    rbufsize = _BLOCK_BYTES
    disable_nagle_algorithm = True

    def handle(self) -> None:
        self._proxy = cast("_Server", self.server).proxy
        self._upstream = http.client.HTTPConnection(*self._proxy.upstream, timeout=600)
        with contextlib.closing(self._upstream), contextlib.suppress(OSError, http.client.HTTPException):
            super().handle()

    def do_GET(self) -> None:
        fault = self._proxy.choose(self.command, self.path)
        kind = fault.kind if fault else None
        shown = f"{self.headers.get('Authorization')} {self.headers.get('X-Amz-Security-Token')}"
        if any(secret in shown for secret in self._proxy.expired):
            for _ in self._body():
                pass
            self._answer_error(400, "ExpiredToken")
            return
        if kind is Kind.RESET_BEFORE_BODY:
            self._reset()
            return
        if fault is not None and kind in {Kind.STATUS, Kind.RESET_AFTER_BODY}:
            for _ in self._body():
                pass
            if kind is Kind.STATUS:
                self._answer_error(fault.status)
            else:
                self._reset()
            return
        if self._proxy.delay_s:
            time.sleep(self._proxy.delay_s)
        self._forward(is_flipped=kind is Kind.FLIPPED)
        response = self._upstream.getresponse()
        if kind is Kind.LOST_ANSWER:
            response.read()
            self._reset()
            return
        if fault is not None and kind is Kind.STALL:
            time.sleep(fault.seconds)
        self._answer(response, kind)

    do_DELETE = do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815  their names are the base class's

    @property
    def _is_chunked(self) -> bool:
        return self.headers.get("Transfer-Encoding", "").lower() == "chunked"

    def _body(self) -> Iterator[bytes]:
        if self._is_chunked:
            while (size := int(self.rfile.readline(_MAX_HEADER_BYTES).split(b";")[0], 16)) > 0:
                yield self.rfile.read(size)
                self.rfile.readline(_MAX_HEADER_BYTES)
            self.rfile.readline(_MAX_HEADER_BYTES)
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left > 0:
            block = self.rfile.read(min(_BLOCK_BYTES, left))
            if not block:
                raise ConnectionError
            left -= len(block)
            yield block

    def _forward(self, *, is_flipped: bool) -> None:
        upstream, is_chunked = self._upstream, self._is_chunked
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOP:
                upstream.putheader(name, value)
        if is_chunked:
            upstream.putheader("Transfer-Encoding", "chunked")
        upstream.endheaders()
        for block in _flipped(self._body()) if is_flipped else self._body():
            self._proxy.up.wait_for(len(block))
            upstream.send(b"%x\r\n%b\r\n" % (len(block), block) if is_chunked else block)
        if is_chunked:
            upstream.send(b"0\r\n\r\n")

    def _answer(self, response: http.client.HTTPResponse, kind: Kind | None) -> None:
        has_body = self.command != "HEAD" and response.status not in {204, 304}
        stated = response.headers.get("Content-Length")
        body, num_bytes = response, int(stated or 0)
        if has_body and (stated is None or kind is Kind.CUT_LIST):
            data = response.read()
            num_bytes = len(data) // 2 if kind is Kind.CUT_LIST else len(data)
            body = io.BytesIO(data)
        headers = [item for item in response.getheaders() if item[0].lower() not in _HOP | {"content-length"}]
        if has_body or stated is not None:
            headers.append(("Content-Length", str(num_bytes + 7 if kind is Kind.WRONG_LENGTH else num_bytes)))
        self._begin_answer(response.status, response.reason, headers)
        left = 0 if not has_body else num_bytes // 2 if kind is Kind.TRUNCATED else num_bytes
        while left > 0 and (block := body.read(min(_BLOCK_BYTES, left))):
            self._proxy.down.wait_for(len(block))
            self.wfile.write(block)
            left -= len(block)
        response.read()  # http.client sends no further request until this response is read, even if it is empty
        if kind in {Kind.TRUNCATED, Kind.WRONG_LENGTH}:
            self.close_connection = True

    def _answer_error(self, status: int, code: str | None = None) -> None:
        usual = {403: "AccessDenied", 429: "SlowDown", 500: "InternalError", 503: "SlowDown"}
        code = code or usual.get(status, "Injected")
        body = b"" if self.command == "HEAD" else f"<Error><Code>{code}</Code></Error>".encode()
        headers = [("Content-Length", str(len(body))), ("Content-Type", "application/xml")]
        self._begin_answer(status, "Injected", headers)
        self.wfile.write(body)

    def _begin_answer(self, status: int, reason: str, headers: Iterable[tuple[str, str]]) -> None:
        self.send_response_only(status, reason)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()

    def _reset(self) -> None:
        # With a linger time of zero seconds, `close` sends RST. Otherwise, the client would see a regular end.
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.request.close()
        self.close_connection = True


def _flipped(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The blocks, with one bit in the middle of the first block inverted."""
    for block in blocks:
        middle = len(block) // 2
        yield block[:middle] + bytes([block[middle] ^ 1]) + block[middle + 1 :]
        yield from blocks


def main(arguments: list[str]) -> int:
    """Run a proxy until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m safepoint.testing.fault_proxy", description=__doc__)
    parser.add_argument("--upstream", required=True, metavar="HOST:PORT")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--error-rate", type=float, default=0.0, help="share of requests that break, in any way")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--mb-per-s", type=float, default=None, help="limit in each direction")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rate = options.mb_per_s * 1e6 if options.mb_per_s else None
    proxy = FaultProxy(
        options.upstream, seed=options.seed, delay_s=options.delay_ms / 1e3, bytes_per_s=rate, port=options.port
    )
    add_mixture(proxy, options.error_rate)
    with proxy, contextlib.suppress(KeyboardInterrupt):
        sys.stdout.write(f"{proxy.endpoint}\n")
        sys.stdout.flush()
        signal.pause()
    return 0


def add_mixture(proxy: FaultProxy, error_rate: float) -> None:
    """Break requests in five ways that a client must survive, about equally often.

    Each of the five faults has a fifth of `error_rate` as its probability. For each request, the faults are tried one
    after another. A small `error_rate` is therefore about the share of requests that break; at a rate of 1, only two
    thirds break.
    """
    kinds = (Kind.STATUS, Kind.RESET_BEFORE_BODY, Kind.RESET_AFTER_BODY, Kind.LOST_ANSWER, Kind.TRUNCATED)
    for kind in kinds:
        proxy.add(Fault(kind=kind, probability=error_rate / len(kinds)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
