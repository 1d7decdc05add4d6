"""Progress over HTTP, on this machine's own address."""

import http.client
import json
import socket
from collections.abc import Iterator

import pytest

from safepoint.progress.metrics_server import MetricsServer, default_host, wants_text
from safepoint.progress.record import Progress
from tests.unit.progress.test_prometheus_text import parse
from tests.unit.progress.test_record import FULL

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


class Known:
    """The record that the server serves."""

    now: tuple[Progress, bool] | None = (FULL, False)

    def look(self) -> tuple[Progress, bool] | None:
        return self.now


@pytest.fixture
def known() -> Known:
    return Known()


@pytest.fixture
def server(known: Known) -> Iterator[MetricsServer]:
    server = MetricsServer(known.look, host="127.0.0.1", port=0)
    yield server
    server.close()


def get(server: MetricsServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers.get("Content-Type", ""), response.read()
    finally:
        connection.close()


def test_the_controller_gets_its_json(server: MetricsServer) -> None:
    """It sends no Accept header."""
    status, kind, body = get(server, "/metrics")
    assert (status, kind) == (200, "application/json")
    assert json.loads(body)["progressPercentage"] == 24


def test_prometheus_gets_its_text(server: MetricsServer) -> None:
    """At the same path by what it accepts, and at its own path always."""
    for path, headers in (
        ("/metrics", {"Accept": PROMETHEUS}),
        ("/metrics/prometheus", {}),
        ("/metrics/prometheus?x=1", {}),
    ):
        status, kind, body = get(server, path, **headers)
        assert status == 200
        assert kind.startswith("text/plain; version=0.0.4")
        assert parse(body.decode())["safepoint_step"] == 120


@pytest.mark.parametrize(
    ("accept", "is_text"),
    [
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("application/json, text/plain, */*", False),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", False),
        ("text/plain", True),
        ("text/plain;q=0", False),
        ("text/plain;q=much", False),
        ("application/json;q=0.5,text/plain", True),
        (PROMETHEUS, True),
    ],
)
def test_text_is_for_those_who_prefer_it(accept: str, is_text: bool) -> None:
    """Everybody else gets JSON."""
    assert wants_text(accept) is is_text


def test_nothing_is_known_yet(server: MetricsServer, known: Known) -> None:
    """503: the controller keeps what it knew of the attempt before."""
    known.now = None
    assert get(server, "/metrics")[0] == 503


def test_there_is_nothing_else(server: MetricsServer) -> None:
    """No other path, no other method; a HEAD has no body."""
    assert get(server, "/")[0] == 404
    assert get(server, "/metrics/../../etc/passwd")[0] == 404
    assert get(server, "/metrics", method="POST")[0] == 501
    status, _, body = get(server, "/metrics", method="HEAD")
    assert (status, body) == (200, b"")


def test_a_silent_client_holds_up_nobody(server: MetricsServer) -> None:
    """Each has a thread of its own."""
    with socket.create_connection(("127.0.0.1", server.port)) as silent:
        silent.send(b"GET /metr")
        assert get(server, "/metrics")[0] == 200


def test_a_port_that_is_taken_is_an_error(server: MetricsServer, known: Known) -> None:
    """On one address and on all; when it is closed, the port is free."""
    for host in ("127.0.0.1", ""):
        with pytest.raises(OSError, match="in use"):
            MetricsServer(known.look, host=host, port=server.port)


def test_only_a_pod_is_open_to_others() -> None:
    """Elsewhere the server answers to this machine alone."""
    assert default_host({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == ""
    assert default_host({}) == "127.0.0.1"
