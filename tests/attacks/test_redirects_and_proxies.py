"""Servers that redirect requests to another host, and proxies that read them: neither gets a token or a key."""

import base64
import contextlib
import http.server
import os
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safepoint.errors import StorageError
from safepoint.foundation import clock
from safepoint.foundation.closed_requests import exchange
from safepoint.storage.location import parse_location
from safepoint.storage.object_store import ObjectStore
from safepoint.storage.options import StorageOptions
from safepoint.training.launcher.status_post import StatusTarget
from tests.support.certificates import encrypted, make_certificates

TOKEN = "a-very-secret-token"
KEYS = {"access_key_id": "known", "secret_access_key": "secret-key", "session_token": TOKEN}


class Recorder:
    """A server that notes all that it is sent, and answers with `answer` and `headers`."""

    def __init__(self, certificates: Path | None = None) -> None:
        self.seen: list[str] = []
        self.answer = 200
        self.headers: dict[str, str] = {}
        recorder = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                recorder.seen.append(f"{self.requestline}\n{self.headers}")
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(recorder.answer)
                for name, value in {"Content-Length": "0", **recorder.headers}.items():
                    self.send_header(name, value)
                self.end_headers()

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_CONNECT = handle_any  # noqa: N815

            def log_message(self, *args: object) -> None:
                """Write no log of requests."""

        if certificates is None:
            self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        else:
            self.server = encrypted(Handler, certificates)
        self.port = int(self.server.server_address[1])
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def other() -> Iterator[Recorder]:
    """The other host, or the proxy."""
    other = Recorder()
    yield other
    other.close()


@pytest.fixture
def server() -> Iterator[Recorder]:
    server = Recorder()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


REQUESTS: dict[str, Callable[[ObjectStore, float], object]] = {
    "write": lambda store, until_s: store.write("key", b"content", deadline_s=until_s),
    "read": lambda store, until_s: store.read("key", deadline_s=until_s),
    "read a range": lambda store, until_s: store.read("key", length=4, deadline_s=until_s),
    "stat": lambda store, until_s: store.stat("key", deadline_s=until_s),
    "list": lambda store, until_s: list(store.list("key", deadline_s=until_s)),
    "delete": lambda store, until_s: store.delete("key", deadline_s=until_s),
    "stream": lambda store, until_s: store.stream("key", lambda _: None, start=0, length=4, deadline_s=until_s),
}


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_store_that_redirects_to_another_host(server: Recorder, other: Recorder, name: str, code: int) -> None:
    """`localhost` is another host than 127.0.0.1."""
    server.answer, server.headers = code, {"Location": f"http://localhost:{other.port}/elsewhere"}
    options = StorageOptions(endpoint=f"http://127.0.0.1:{server.port}", **KEYS)
    with pytest.raises(StorageError, match=r"redirects to another (host|address)") as error:
        REQUESTS[name](ObjectStore(parse_location("s3://bucket/run"), options), clock.monotonic_s() + 0.6)
    assert "AWS_ENDPOINT_URL_S3" in str(error.value)
    assert server.seen
    assert not other.seen


@pytest.mark.parametrize("name", REQUESTS)
def test_an_encrypted_store_is_reached_through_a_proxy_in_a_tunnel_only(
    other: Recorder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request asks the proxy for a tunnel. Where it is refused, the proxy has seen no token and no key."""
    monkeypatch.setenv("https_proxy", f"http://user:word@127.0.0.1:{other.port}")
    other.answer = 403
    options = StorageOptions(endpoint="https://store.example", **KEYS)
    with pytest.raises(StorageError) as error:
        REQUESTS[name](ObjectStore(parse_location("s3://bucket/run"), options), clock.monotonic_s() + 0.6)
    assert "word" not in str(error.value)
    assert other.seen[0].startswith("CONNECT store.example:443")
    assert base64.b64encode(b"user:word").decode() in other.seen[0]
    assert TOKEN not in "".join(other.seen)


def test_no_proxy_for_the_store(server: Recorder, other: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{other.port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    options = StorageOptions(endpoint=f"https://127.0.0.1:{server.port}", **KEYS)
    for request in REQUESTS.values():
        with pytest.raises(StorageError):
            request(ObjectStore(parse_location("s3://bucket/run"), options), clock.monotonic_s() + 0.6)
    assert not other.seen


@pytest.mark.parametrize("name", REQUESTS)
def test_a_proxy_does_not_see_what_is_sent_to_a_store_without_encryption(
    server: Recorder, other: Recorder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{other.port}")
    monkeypatch.setenv("ALL_PROXY", f"http://127.0.0.1:{other.port}")
    server.answer = 403
    options = StorageOptions(endpoint=f"http://127.0.0.1:{server.port}", **KEYS)
    with pytest.raises(StorageError):
        REQUESTS[name](ObjectStore(parse_location("s3://bucket/run"), options), clock.monotonic_s() + 0.6)
    assert server.seen
    assert not other.seen


def test_a_store_that_redirects_to_the_same_host_without_encryption(
    other: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = make_certificates(tmp_path)
    server = Recorder(certificates)
    try:
        server.answer, server.headers = 307, {"Location": f"http://127.0.0.1:{other.port}/elsewhere"}
        options = StorageOptions(endpoint=f"https://127.0.0.1:{server.port}", verify_tls=False, **KEYS)
        with pytest.raises(StorageError):
            ObjectStore(parse_location("s3://bucket/run"), options).stat("key", deadline_s=clock.monotonic_s() + 1)
        assert server.seen
        assert not other.seen
    finally:
        server.close()


def target(url: str, folder: Path) -> StatusTarget:
    (folder / "token").write_text(TOKEN)
    return StatusTarget(url=url, token=folder / "token")


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_controller_that_redirects(server: Recorder, other: Recorder, code: int, tmp_path: Path) -> None:
    server.answer, server.headers = code, {"Location": f"http://localhost:{other.port}/elsewhere"}
    with pytest.raises(OSError, match=f"status {code}"):
        target(f"http://127.0.0.1:{server.port}/status", tmp_path).send(b"{}")
    assert TOKEN in server.seen[0]
    assert not other.seen


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_a_status_without_encryption_does_not_go_through_a_proxy(
    server: Recorder, other: Recorder, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, f"http://127.0.0.1:{other.port}")
    target(f"http://127.0.0.1:{server.port}/status", tmp_path).send(b"{}")
    assert len(server.seen) == 1
    assert not other.seen


def test_an_encrypted_status_goes_through_a_proxy_in_a_tunnel_only(
    other: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy sees a host and its own password, and no token, also where it refuses the tunnel."""
    monkeypatch.setenv("https_proxy", f"http://user:word@127.0.0.1:{other.port}")
    other.answer = 403
    with pytest.raises(OSError, match="403") as error:
        target("https://controller.example/status", tmp_path).send(b"{}")
    assert "word" not in str(error.value)
    assert other.seen[0].startswith("CONNECT controller.example:443")
    assert base64.b64encode(b"user:word").decode() in other.seen[0]
    assert TOKEN not in "".join(other.seen)


@pytest.mark.parametrize("url", ["http://controller.example/status", "http://127.0.0.1.example/", "ftp://127.0.0.1/"])
def test_a_status_is_not_sent_to_another_host_without_encryption(
    url: str, other: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{other.port}")
    with pytest.raises(OSError, match="not https"):
        target(url, tmp_path).send(b"{}")
    assert not other.seen


@pytest.mark.parametrize("name", ["AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"])
def test_a_token_in_the_address_is_not_sent_as_referer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SAS token of Azure is a part of each address, and a client may name the address that redirected it."""
    pytest.importorskip("obstore")
    certificates = make_certificates(tmp_path)
    store, elsewhere = Recorder(certificates), Recorder(certificates)
    store.answer, store.headers = 307, {"Location": f"https://localhost:{elsewhere.port}/a"}
    for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"https://127.0.0.1:{store.port}")
    monkeypatch.setenv(name, f"sv=2026&sig={TOKEN}")
    options = StorageOptions(verify_tls=False, request_timeout_s=3)
    azure = ObjectStore(parse_location("az://container/run"), options)
    try:
        for request in (
            lambda: azure.stat("a", deadline_s=clock.monotonic_s() + 3),
            lambda: azure.read("a", length=1, deadline_s=clock.monotonic_s() + 3),
            lambda: list(azure.list(deadline_s=clock.monotonic_s() + 3)),
            lambda: azure.write("a", b"x", deadline_s=clock.monotonic_s() + 3),
            lambda: azure.delete("a", deadline_s=clock.monotonic_s() + 3),
        ):
            with contextlib.suppress(StorageError):
                request()
        assert any(TOKEN in seen for seen in store.seen)
        assert not elsewhere.seen
    finally:
        store.close()
        elsewhere.close()


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "ALL_PROXY"])
@pytest.mark.parametrize("scheme", ["https", "socks5", "socks4", "ftp"])
def test_a_proxy_that_would_get_its_password_without_encryption(
    scheme: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tunnel is opened by plain HTTP: no other proxy is spoken to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv(name, f"{scheme}://user:PROXYPW@127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "")
        options = StorageOptions(**KEYS)  # pyright: ignore[reportArgumentType]
        with pytest.raises(StorageError, match="only http:// is supported") as refused:
            list(ObjectStore(parse_location("s3://bucket/run"), options).list())
        assert "PROXYPW" not in str(refused.value)
        request = urllib.request.Request("https://sts.amazonaws.com", data=b"x")
        with pytest.raises(OSError, match="only http:// is supported"):
            exchange(request, to="it", timeout_s=5, max_bytes=10)
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
