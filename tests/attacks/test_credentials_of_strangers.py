"""Endpoints that issue keys, in a hostile environment: each request ends in time, and no key leaves its header."""

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import AccessDeniedError, StorageError, TransientError
from safepoint.foundation import clock
from safepoint.storage.options import StorageOptions
from safepoint.storage.s3 import credentials
from safepoint.storage.s3.credentials import Keys, find_keys

_KEYS = {"AccessKeyId": "a", "SecretAccessKey": "b", "Token": "c", "Expiration": "2999-01-01T00:00:00Z"}
Answer = Callable[[Any], None]


@contextmanager
def _endpoint(answer: Answer) -> Iterator[Mapping[str, str]]:
    """The environment of a process whose endpoint for keys answers so."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None:
            """Write no log of requests."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://127.0.0.1:{server.server_port}/"}
    finally:
        server.shutdown()
        server.server_close()


def _drip(handler: Any, data: bytes) -> None:
    for _ in range(300):
        handler.wfile.write(data)
        handler.wfile.flush()
        time.sleep(0.1)


def _body_by_bytes(handler: Any) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n")
    _drip(handler, b" ")


def _headers_by_bytes(handler: Any) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\na: ")
    _drip(handler, b"x")


def _continue_without_end(handler: Any) -> None:
    _drip(handler, b"HTTP/1.1 100 Continue\r\n\r\n")


@pytest.mark.parametrize("answer", [_body_by_bytes, _headers_by_bytes, _continue_without_end])
def test_an_answer_byte_by_byte(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte comes in time, and the answer never ends."""
    monkeypatch.setattr(credentials, "_REQUEST_S", 1.0)
    with _endpoint(answer) as environ:
        source = find_keys(StorageOptions(), environ)
        assert source is not None
        begun_s = clock.monotonic_s()
        with pytest.raises(TransientError, match="no keys for the object store"):
            source.current()
        assert clock.monotonic_s() - begun_s < 10


_WRONG = {
    "a further header": {"Token": "c\r\nHost: elsewhere"},
    "a key with a line": {"AccessKeyId": "a\nb"},
    "a secret with a line": {"SecretAccessKey": "a\nb"},
    "no header's character": {"Token": "\u4e2d"},
    "a surrogate": {"SecretAccessKey": "\ud800"},
    "a zero": {"AccessKeyId": "a\0"},
    "a blank": {"AccessKeyId": "a b"},
}


@pytest.mark.parametrize("name", _WRONG)
def test_keys_that_no_request_can_contain(name: str) -> None:
    """They are refused where they come from, and are not in the message."""

    def answer(handler: Any) -> None:
        body = json.dumps({**_KEYS, **_WRONG[name]}).encode()
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    with _endpoint(answer) as environ:
        source = find_keys(StorageOptions(), environ)
        assert source is not None
        with pytest.raises(AccessDeniedError, match="it has no valid keys") as raised:
            source.current()
    assert not any(value in str(raised.value) for value in _WRONG[name].values())


@pytest.mark.parametrize("variable", ["AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_EC2_METADATA_SERVICE_ENDPOINT"])
def test_a_refused_address_is_named(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the variable with the address. No request is sent, so it says nothing about keys."""
    monkeypatch.setenv("HOME", str(tmp_path))
    source = find_keys(StorageOptions(), {variable: "http://elsewhere.example/"})
    with pytest.raises(AccessDeniedError, match=f": {variable} is n") as raised:
        source.current()
    assert "no valid keys" not in str(raised.value)


def test_keys_of_the_environment() -> None:
    with pytest.raises(ValueError, match="characters that a request cannot contain") as raised:
        find_keys(StorageOptions(access_key_id="a", secret_access_key="se\ncret"), {})
    assert "cret" not in str(raised.value)
    assert Keys(access_key_id="AKIA/+=", secret_access_key="wJ/+=", session_token="a==").session_token == "a=="


@pytest.mark.parametrize(
    "body", [b"<a>" * 20_000 + b" " * 4000, b"<a>" + b" " * 60_000, b"<" * 65_000, b"<a" * 32_000]
)
def test_an_answer_made_for_a_pattern(body: bytes) -> None:
    begun_s = clock.monotonic_s()
    assert credentials._elements(body) == {}
    assert clock.monotonic_s() - begun_s < 5


def test_an_answer_of_the_token_service() -> None:
    body = b"<a><AccessKeyId>\n x </AccessKeyId><SecretAccessKey>y</SecretAccessKey></a>"
    assert credentials._elements(body) == {"AccessKeyId": "x", "SecretAccessKey": "y"}


def test_many_at_once() -> None:
    """The time is that of one request, and does not belong to the process."""

    def answer(handler: Any) -> None:
        handler.wfile.write(b"HTTP/1.1 500 a\r\n\r\n")

    with _endpoint(answer) as environ:
        for _ in range(3):
            source = find_keys(StorageOptions(), environ)
            assert source is not None
            with pytest.raises(StorageError):
                source.current()
