"""Each fault really appears on the wire, and nothing else changes."""

import http.client
import http.server
import threading
import time
from collections.abc import Iterator

import pytest

from safepoint.testing.fault_proxy import Fault, FaultProxy, Kind, add_mixture

_BODY = b"0123456789" * 100


class Upstream(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    done: list[tuple[str, str, bytes, str | None]] = []  # noqa: RUF012  emptied by the fixture

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.done.append((self.command, self.path, body, self.headers.get("Host")))
        self.send_response(200)
        self.send_header("Content-Length", str(len(_BODY)))
        self.send_header("ETag", '"tag"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(_BODY)

    do_PUT = do_HEAD = do_GET  # noqa: N815  the names that http.server looks for

    def log_message(self, *args: object) -> None:
        """Silent."""


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    Upstream.done.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with FaultProxy(f"127.0.0.1:{server.server_address[1]}", seed=3) as running:
        yield running
    server.shutdown()
    server.server_close()
    thread.join()


def ask(proxy: FaultProxy, method: str = "GET", body: bytes | None = None, path: str = "/b/key?x=1"):
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    try:
        connection.request(method, path, body=body)
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    finally:
        connection.close()


def test_one_bit_of_a_body_is_flipped(proxy: FaultProxy) -> None:
    """The request arrives with its length, and with one bit that is another."""
    proxy.add(Fault(kind=Kind.FLIPPED, method="PUT"))
    assert ask(proxy, "PUT", body=bytes(1000))[0] == 200
    assert (len(Upstream.done[0][2]), sum(Upstream.done[0][2])) == (1000, 1)


def test_without_a_fault_everything_passes(proxy: FaultProxy) -> None:
    """Body, headers and Host arrive as they were sent, on one connection that stays open."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    for number in range(3):
        connection.request("PUT", f"/b/{number}", body=b"x" * 5000)
        response = connection.getresponse()
        assert (response.status, response.read(), response.headers["ETag"]) == (200, _BODY, '"tag"')
    connection.close()
    assert Upstream.done == [("PUT", f"/b/{number}", b"x" * 5000, f"127.0.0.1:{proxy.port}") for number in range(3)]
    assert proxy.requests == {"PUT": 3}
    assert ask(proxy, "HEAD")[2]["Content-Length"] == str(len(_BODY))


def test_one_connection_takes_many_requests(proxy: FaultProxy) -> None:
    """Also after an answer without a body."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    for method in ("GET", "HEAD", "PUT", "HEAD", "HEAD", "GET"):
        connection.request(method, "/b/key", body=b"x" if method == "PUT" else None)
        response = connection.getresponse()
        assert response.status == 200
        response.read()
        assert connection.sock is not None, "it was closed"
    connection.close()
    assert [call[0] for call in Upstream.done] == ["GET", "HEAD", "PUT", "HEAD", "HEAD", "GET"]


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_a_status_is_answered_and_nothing_forwarded(status: int, proxy: FaultProxy) -> None:
    """With S3's XML, once, when it is for the first request only."""
    proxy.add(Fault(kind=Kind.STATUS, status=status, nth=1))
    found, body, _ = ask(proxy, "PUT", b"content")
    assert found == status
    assert b"<Code>" in body
    assert Upstream.done == []
    assert ask(proxy)[0] == 200
    assert proxy.injected == {Kind.STATUS: 1}


@pytest.mark.parametrize("kind", [Kind.RESET_BEFORE_BODY, Kind.RESET_AFTER_BODY, Kind.LOST_ANSWER])
def test_resets(kind: Kind, proxy: FaultProxy) -> None:
    """The client sees a broken connection; the server has done the work only when the answer was lost."""
    proxy.add(Fault(kind=kind))
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        ask(proxy, "PUT", b"x" * 100)
    assert len(Upstream.done) == (1 if kind is Kind.LOST_ANSWER else 0)


@pytest.mark.parametrize("kind", [Kind.TRUNCATED, Kind.WRONG_LENGTH])
def test_answers_that_end_early(kind: Kind, proxy: FaultProxy) -> None:
    """The length that was stated does not arrive."""
    proxy.add(Fault(kind=kind))
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(proxy)
    assert len(caught.value.partial) == (len(_BODY) if kind is Kind.WRONG_LENGTH else len(_BODY) // 2)


def test_a_cut_list_looks_whole(proxy: FaultProxy) -> None:
    """Half of the content under a length that fits."""
    proxy.add(Fault(kind=Kind.CUT_LIST))
    assert ask(proxy)[1] == _BODY[: len(_BODY) // 2]


def test_a_stall_and_a_slow_link(proxy: FaultProxy) -> None:
    """The answer comes, later."""
    proxy.add(Fault(kind=Kind.STALL, seconds=0.3, nth=1))
    begun = time.monotonic()
    assert ask(proxy)[1] == _BODY
    assert time.monotonic() - begun >= 0.3
    with FaultProxy(f"127.0.0.1:{proxy.upstream[1]}", delay_s=0.1, bytes_per_s=10_000) as slow:
        begun = time.monotonic()
        assert ask(slow, "PUT", bytes(1000))[1] == _BODY
        assert time.monotonic() - begun >= 0.3


def test_rules_choose_requests(proxy: FaultProxy) -> None:
    """By method, by what the target contains, by number."""
    proxy.add(Fault(kind=Kind.STATUS, method="PUT", contains="uploadId", nth=2))
    assert [ask(proxy, "PUT", b"", "/b/k?uploadId=1")[0] for _ in range(3)] == [200, 503, 200]
    assert ask(proxy, "GET", None, "/b/k?uploadId=1")[0] == 200
    assert ask(proxy, "PUT", b"", "/b/k")[0] == 200


def test_a_mixture_has_its_rate(proxy: FaultProxy) -> None:
    """About a fifth of the rate for each kind; the same seed breaks the same requests."""
    add_mixture(proxy, 0.2)
    chosen = [proxy.choose("GET", "/") for _ in range(2000)]
    assert 300 < len([fault for fault in chosen if fault]) < 500
    assert len(proxy.injected) == 5
    again = FaultProxy("127.0.0.1:1", seed=3)
    add_mixture(again, 0.2)
    assert [again.choose("GET", "/") for _ in range(2000)] == chosen
    again._server.server_close()


@pytest.mark.parametrize("values", [{"probability": 1.5}, {"nth": 0}])
def test_faults_that_cannot_be_meant(values: dict[str, float]) -> None:
    """The field and the value are named."""
    with pytest.raises(ValueError, match=f"{next(iter(values))} {next(iter(values.values()))}"):
        Fault(kind=Kind.STALL, **values)  # type: ignore[arg-type]
