"""A proxy on loopback between a client and an S3 server, which injects the requested faults.

    with FaultProxy("127.0.0.1:9000", seed=1) as proxy:
        proxy.add(Fault(kind=Kind.STATUS, status=503, probability=0.05))
        ...                                  # AWS_ENDPOINT_URL_S3 = proxy.endpoint
        print(proxy.injected)

    python -m safepoint.testing.fault_proxy --upstream 127.0.0.1:9000 --error-rate 0.05 --delay-ms 20

The Host header is passed on unchanged, so that signatures stay valid. Plain HTTP only.
"""

import argparse
import contextlib
import enum
import http.client
import random
import signal
import socket
import socketserver
import struct
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

_BLOCK_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 16
_HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}


class Kind(enum.StrEnum):
    """What breaks."""

    STATUS = "status"
    """The request is read and not forwarded; the answer is `status`, with S3's XML."""
    RESET_BEFORE_BODY = "reset-before-body"
    """The connection is reset when the request's headers have arrived."""
    RESET_AFTER_BODY = "reset-after-body"
    """The connection is reset when the whole request has arrived; it is not forwarded."""
    LOST_ANSWER = "lost-answer"
    """The server executes the request; the connection is reset instead of its answer."""
    TRUNCATED = "truncated"
    """Half of the answer's body, then the connection ends."""
    WRONG_LENGTH = "wrong-length"
    """The answer states seven bytes more than it has."""
    CUT_LIST = "cut-list"
    """Half of the answer's body, with a length that fits: a page of a listing that ends in its middle."""
    STALL = "stall"
    """No byte of the answer for `seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way to break some requests.

    Args:
        kind: what breaks.
        method: only requests of this method; None for all.
        contains: only requests whose path and query contain this.
        nth: only the n-th such request, from 1; None for all of them.
        probability: of those, how many break.
        status: for `Kind.STATUS`.
        seconds: for `Kind.STALL`.
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
        seed: of the dice for `Fault.probability`.
        delay_s: before each request is forwarded.
        bytes_per_s: limit for the bodies of each direction, all connections together; None for none.
        port: 0 for a free one.
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
        self._faults: list[Fault] = []
        self._matched = Counter[int]()
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self.up = _Throttle(bytes_per_s)
        self.down = _Throttle(bytes_per_s)
        self._server = _Server(("127.0.0.1", port), _Connection)
        self._server.proxy = self
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        """The URL for the client to use instead of the server's."""
        return f"http://127.0.0.1:{self.port}"

    def add(self, fault: Fault) -> None:
        """From now on inject `fault`; the first fault that matches a request is used."""
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """Inject no faults any more."""
        with self._lock:
            self._faults.clear()
            self._matched.clear()

    def choose(self, method: str, target: str) -> Fault | None:
        """Count the request and pick its fault."""
        with self._lock:
            self.requests[method] += 1
            for index, fault in enumerate(self._faults):
                if fault.method not in {None, method} or fault.contains not in target:
                    continue
                self._matched[index] += 1
                if fault.nth not in {None, self._matched[index]} or self._dice.random() >= fault.probability:
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
    """Lets bytes pass at a rate, over all connections."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def pass_on(self, num_bytes: int) -> None:
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
        """Ignore clients that disconnect; that is what this proxy causes."""


@dataclass(slots=True, kw_only=True)
class _Request:
    method: str
    target: str
    headers: list[tuple[str, str]]
    length: int
    is_chunked: bool


class _Connection(socketserver.StreamRequestHandler):
    rbufsize = _BLOCK_BYTES

    def handle(self) -> None:
        proxy = cast("_Server", self.server).proxy
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        upstream = http.client.HTTPConnection(*proxy.upstream, timeout=600)
        with contextlib.closing(upstream), contextlib.suppress(OSError, http.client.HTTPException):
            while (request := self._read_head()) is not None:
                if not self._serve(proxy, upstream, request):
                    return

    def _read_head(self) -> _Request | None:
        line = self.rfile.readline(_MAX_HEADER_BYTES)
        if not line.strip():
            return None
        method, target, _ = line.decode("latin-1").split(" ", 2)
        headers: list[tuple[str, str]] = []
        while (text := self.rfile.readline(_MAX_HEADER_BYTES).decode("latin-1").rstrip("\r\n")) != "":
            name, _, value = text.partition(":")
            headers.append((name, value.strip()))
        fields = {name.lower(): value for name, value in headers}
        return _Request(
            method=method,
            target=target,
            headers=headers,
            length=int(fields.get("content-length") or 0),
            is_chunked=fields.get("transfer-encoding", "").lower() == "chunked",
        )

    def _serve(self, proxy: FaultProxy, upstream: http.client.HTTPConnection, request: _Request) -> bool:
        """Forward one request; returns whether the connection stays open."""
        fault = proxy.choose(request.method, request.target)
        kind = fault.kind if fault else None
        if kind is Kind.RESET_BEFORE_BODY:
            return self._reset()
        if any(name.lower() == "expect" for name, _ in request.headers):
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault is not None and kind in {Kind.STATUS, Kind.RESET_AFTER_BODY}:
            for _ in self._body(request):
                pass
            return self._reset() if kind is Kind.RESET_AFTER_BODY else self._answer_error(request, fault.status)
        if proxy.delay_s:
            time.sleep(proxy.delay_s)
        self._forward(proxy, upstream, request)
        response = upstream.getresponse()
        if kind is Kind.LOST_ANSWER:
            response.read()
            return self._reset()
        if fault is not None and kind is Kind.STALL:
            time.sleep(fault.seconds)
        return self._answer(proxy, request, response, kind)

    def _body(self, request: _Request) -> Any:
        if not request.is_chunked:
            left = request.length
            while left > 0:
                block = self.rfile.read(min(_BLOCK_BYTES, left))
                if not block:
                    raise ConnectionError
                left -= len(block)
                yield block
            return
        while (size := int(self.rfile.readline(_MAX_HEADER_BYTES).split(b";")[0], 16)) > 0:
            yield self.rfile.read(size)
            self.rfile.readline(_MAX_HEADER_BYTES)
        self.rfile.readline(_MAX_HEADER_BYTES)

    def _forward(self, proxy: FaultProxy, upstream: http.client.HTTPConnection, request: _Request) -> None:
        upstream.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers:
            if name.lower() not in _HOP:
                upstream.putheader(name, value)
        if request.is_chunked:
            upstream.putheader("Transfer-Encoding", "chunked")
        upstream.endheaders()
        for block in self._body(request):
            proxy.up.pass_on(len(block))
            upstream.send(b"%x\r\n%b\r\n" % (len(block), block) if request.is_chunked else block)
        if request.is_chunked:
            upstream.send(b"0\r\n\r\n")

    def _answer(
        self, proxy: FaultProxy, request: _Request, response: http.client.HTTPResponse, kind: Kind | None
    ) -> bool:
        has_body = request.method != "HEAD" and response.status not in {204, 304}
        length = int(response.headers.get("Content-Length") or 0)
        stream: BinaryIO | None = None
        data = b""
        if has_body and response.headers.get("Content-Length") is not None and kind is not Kind.CUT_LIST:
            stream = cast("BinaryIO", response)
        elif has_body:
            data = response.read()
            length = len(data)
        sent_bytes = length
        if kind is Kind.TRUNCATED:
            sent_bytes = length // 2
        if kind is Kind.CUT_LIST:
            data, length = data[: length // 2], length // 2
            sent_bytes = length
        stated = length + 7 if kind is Kind.WRONG_LENGTH else length
        head = [f"HTTP/1.1 {response.status} {response.reason}"]
        head += [
            f"{name}: {value}"
            for name, value in response.getheaders()
            if name.lower() not in _HOP | {"content-length"}
        ]
        if has_body or response.headers.get("Content-Length") is not None:
            head.append(f"Content-Length: {stated}")
        self.wfile.write("\r\n".join([*head, "", ""]).encode("latin-1"))
        while has_body and sent_bytes > 0:
            block = stream.read(min(_BLOCK_BYTES, sent_bytes)) if stream else data[:sent_bytes]
            if not block:
                break
            proxy.down.pass_on(len(block))
            self.wfile.write(block)
            sent_bytes -= len(block)
        self.wfile.flush()
        if kind in {Kind.TRUNCATED, Kind.WRONG_LENGTH}:
            return False
        response.read()  # also where there is no body: until then the connection takes no further request
        return True

    def _answer_error(self, request: _Request, status: int) -> bool:
        code = {403: "AccessDenied", 429: "SlowDown", 500: "InternalError", 503: "SlowDown"}.get(status, "Injected")
        body = b"" if request.method == "HEAD" else f"<Error><Code>{code}</Code></Error>".encode()
        head = f"HTTP/1.1 {status} Injected\r\nContent-Length: {len(body)}\r\nContent-Type: application/xml\r\n\r\n"
        self.wfile.write(head.encode() + body)
        return True

    def _reset(self) -> bool:
        # Linger of zero seconds: close sends RST, and the client sees what a broken network looks like.
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.request.close()
        return False


def main(arguments: list[str]) -> int:
    """Run a proxy until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m safepoint.testing.fault_proxy", description=__doc__)
    parser.add_argument("--upstream", required=True, metavar="HOST:PORT")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--error-rate", type=float, default=0.0, help="share of requests that break, in any way")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--mb-per-s", type=float, default=None, help="limit of each direction")
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
    """Break `error_rate` of all requests, a fifth of them in each of five ways that a client must survive."""
    kinds = (Kind.STATUS, Kind.RESET_BEFORE_BODY, Kind.RESET_AFTER_BODY, Kind.LOST_ANSWER, Kind.TRUNCATED)
    for kind in kinds:
        proxy.add(Fault(kind=kind, probability=error_rate / len(kinds)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
