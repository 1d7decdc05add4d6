"""Tests of safepoint.jobs.cluster.login.bearer: a command that runs for hours goes on after its token was renewed."""

import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from kubernetes import client, config

from safepoint.errors import AccessDeniedError
from safepoint.jobs.cluster import connection as connections
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.connection import Connection, connect_to, connect_with
from safepoint.jobs.cluster.login.bearer import Bearer
from safepoint.jobs.cluster.watches import job_watch
from safepoint.jobs.cluster.watches.job_watch import JobWatch

PROGRAM = """
import json, sys
token = open(sys.argv[1]).read()
kind = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
print(json.dumps({**kind, "status": {"token": token, "expirationTimestamp": "2020-01-01T00:00:00Z"}}))
"""


class Server:
    """An API server with one TrainJob that accepts one token. It ends a watch after the first change."""

    def __init__(self) -> None:
        self.token = "first"
        self.num_refused = 0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # noqa: N805  `self` is the server
                is_valid = handler.headers["Authorization"] == f"Bearer {self.token}"
                self.num_refused += not is_valid
                item = {"metadata": {"name": "tiny", "uid": "u", "resourceVersion": "2"}, "spec": {}}
                body: Any = {"items": [item] if "/trainjobs" in handler.path else [], "metadata": {}}
                if "watch=true" in handler.path:
                    body = {"type": "MODIFIED", "object": item}
                data = json.dumps(body if is_valid else {"message": "Unauthorized"}).encode() + b"\n"
                handler.send_response(200 if is_valid else 401)
                handler.send_header("content-length", str(len(data)))
                handler.end_headers()
                handler.wfile.write(data)

            def log_message(handler, *_: object) -> None:  # noqa: N805
                """Write no log."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def _kubeconfig(folder: Path, url: str, user: dict[str, Any]) -> Path:
    path = folder / "config"
    document = {
        "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "ns"}}],
    }
    path.write_text(json.dumps(document))
    return path


def _program(folder: Path) -> dict[str, Any]:
    script = folder / "program.py"
    script.write_text(PROGRAM)
    version = "client.authentication.k8s.io/v1"
    return {"apiVersion": version, "command": sys.executable, "args": [str(script), str(folder / "token")]}


def of_kubeconfig(folder: Path, server: Server, _: pytest.MonkeyPatch) -> Connection:
    """The token is in the kubeconfig itself: a person logs in again."""
    user = {"token": (folder / "token").read_text()}
    return connect_to(file=_kubeconfig(folder, server.url, user))


def of_token_file(folder: Path, server: Server, _: pytest.MonkeyPatch) -> Connection:
    """The kubeconfig names a file."""
    return connect_to(file=_kubeconfig(folder, server.url, {"tokenFile": "token"}))


def of_program(folder: Path, server: Server, _: pytest.MonkeyPatch) -> Connection:
    """The kubeconfig names a program, as those of cloud providers do."""
    return connect_to(file=_kubeconfig(folder, server.url, {"exec": _program(folder)}))


def of_service_account(folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Connection:
    """The kubelet renews the token of a pod."""
    (folder / "namespace").write_text("ns")
    monkeypatch.setattr(connections, "SERVICE_ACCOUNT", folder)
    real = connections.KubeConfig.from_service_account
    monkeypatch.setattr(connections.KubeConfig, "from_service_account", lambda: real(folder))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    found = connect_to()
    found.config.cluster.server, found.config.cluster.certificate_auth = server.url, None
    return found


def of_hook(folder: Path, server: Server, _: pytest.MonkeyPatch) -> Connection:
    """A notebook passes a configuration that renews its token itself."""

    def renew(configuration: client.Configuration) -> None:
        configuration.api_key["authorization"] = f"Bearer {(folder / 'token').read_text()}"

    configuration = client.Configuration(host=server.url)
    configuration.refresh_api_key_hook = renew
    return connect_with(configuration, namespace="ns")


def of_loaded_kubeconfig(folder: Path, server: Server, _: pytest.MonkeyPatch) -> Connection:
    """The Python client has read a kubeconfig that names a program, whose tokens expire."""
    configuration = client.Configuration()
    path = _kubeconfig(folder, server.url, {"exec": _program(folder)})
    config.load_kube_config(config_file=str(path), client_configuration=configuration)
    return connect_with(configuration, namespace="ns")


Origin = Callable[[Path, Server, pytest.MonkeyPatch], Connection]
ORIGINS = pytest.mark.parametrize(
    "origin",
    [of_kubeconfig, of_token_file, of_program, of_service_account, of_hook, of_loaded_kubeconfig],
    ids=lambda origin: origin.__name__,
)


def _renew(folder: Path, server: Server, token: str) -> None:
    """The server no longer accepts the token of before, and the origin has the new one."""
    (folder / "token").write_text(token)
    path = folder / "config"
    if path.exists():
        document = json.loads(path.read_text())
        if "token" in document["users"][0]["user"]:
            document["users"][0]["user"] = {"token": token}
            path.write_text(json.dumps(document))
    server.token = token


@ORIGINS
def test_requests_and_streams_go_on(
    origin: Origin, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists, watches and outputs, each time after the token was renewed."""
    (tmp_path / "token").write_text("first")
    with ClusterApi(origin(tmp_path, server, monkeypatch)) as api:
        assert len(api.objects("trainjobs")) == 1
        for number, ask in enumerate(
            (
                lambda: api.objects("trainjobs"),
                lambda: list(api.watch("trainjobs", version="1")),
                lambda: list(api.log("tiny-node-0-0-abcde", "node", follow=True)),
            )
        ):
            _renew(tmp_path, server, f"token-{number}")
            assert len(ask()) == 1
            assert server.num_refused == number + 1


@ORIGINS
def test_a_watch_of_all_jobs_goes_on(
    origin: Origin, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three threads watch, and each asks again when its stream has ended."""
    monkeypatch.setattr(job_watch, "_AGAIN_S", 0.01)
    (tmp_path / "token").write_text("first")
    with ClusterApi(origin(tmp_path, server, monkeypatch)) as api, JobWatch(api) as watch:
        assert len(watch.jobs()) == 1
        before = server.num_refused
        _renew(tmp_path, server, "second")
        while server.num_refused == before:
            watch.wait(1)
        _until_changed(watch)
        assert len(watch.jobs()) == 1


def _until_changed(watch: JobWatch) -> None:
    """Wait for two more changes: the first one may be of a stream that was open before."""
    for _ in range(2):
        assert watch._has_changed.wait(30)
        watch._has_changed.clear()


def test_several_threads_read_a_token_once(tmp_path: Path) -> None:
    """A program may ask a person to log in, who should be asked once."""
    threads, tokens = 3, iter(["old", "new"])
    bearer = Bearer("your token", lambda: next(tokens))
    refused = threading.Barrier(threads)

    def answer(request: httpx2.Request) -> httpx2.Response:
        is_old = request.headers["Authorization"] == "Bearer old"
        if is_old and request.url.path == "/together":
            refused.wait(30)  # all threads have sent the old token before the first one gets an answer
        return httpx2.Response(401 if is_old and request.url.path == "/together" else 200)

    found: list[int] = []
    with httpx2.Client(auth=bearer, transport=httpx2.MockTransport(answer)) as http_client:
        assert http_client.get("http://k/first").status_code == 200
        asking = [
            threading.Thread(target=lambda: found.append(http_client.get("http://k/together").status_code))
            for _ in range(threads)
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(30)
    assert found == [200] * threads
    assert next(tokens, None) is None


def test_the_token_of_another_cluster_is_not_sent(server: Server, tmp_path: Path) -> None:
    """The context of the kubeconfig has got another address meanwhile."""
    path = _kubeconfig(tmp_path, server.url, {"token": "first"})
    with ClusterApi(connect_to(file=path)) as api:
        assert len(api.objects("trainjobs")) == 1
        server.token = "second"
        _kubeconfig(tmp_path, "https://other:6443", {"token": "second"})
        with pytest.raises(AccessDeniedError, match="now has the address https://other:6443"):
            api.objects("trainjobs")


def test_a_program_that_is_asked_for_a_new_token_and_fails_is_named(server: Server, tmp_path: Path) -> None:
    """One sentence with what to do."""
    (tmp_path / "token").write_text("first")
    user = {"exec": _program(tmp_path)}
    with ClusterApi(connect_to(file=_kubeconfig(tmp_path, server.url, user))) as api:
        assert len(api.objects("trainjobs")) == 1
        (tmp_path / "token").unlink()
        server.token = "second"
        with pytest.raises(AccessDeniedError, match="the program that gives your token for c failed") as caught:
            api.objects("trainjobs")
        assert caught.value.hint is not None
        assert "log in to the cluster again" in caught.value.hint
