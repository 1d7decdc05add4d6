"""Files with keys and tokens that another user has put where everyone may write, or that have no end.

The stranger's keys would be used, so that the checkpoints go to the stranger; a pipe or a device would never end.
"""

import http.server
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from safepoint.dashboard.settings import DashboardSettings
from safepoint.errors import AccessDeniedError, ObjectNotFoundError, SafepointError, UsageError
from safepoint.foundation import clock
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.library.key_files import KeyFiles
from safepoint.storage.location import parse_location
from safepoint.storage.object_store import ObjectStore
from safepoint.storage.options import StorageOptions
from safepoint.storage.s3.credentials import find_keys
from safepoint.training.launcher.status_post import StatusTarget
from safepoint.training.rendezvous.job_secret import SECRET_FILE, agree_on_secret

_STRANGER = 65534
_KEYS = "[default]\naws_access_key_id = STRANGER\naws_secret_access_key = x\n"
_KINDS = [
    pytest.param(
        "stranger's", marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
    ),
    "pipe",
    "device",
    "too large",
]


def plant(path: Path, kind: str) -> Path:
    """A file in a folder like /tmp."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o1777)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "too large":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.write_text(_KEYS)
        os.chown(path, _STRANGER, _STRANGER)
    return path


def failure_of(use: Callable[[], object]) -> Exception:
    """How a use of the file ends. The test fails if it does not end or succeeds."""
    found: list[Exception] = []

    def run() -> None:
        try:
            use()
        except Exception as error:  # noqa: BLE001
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it waits"
    assert found, "the file was used"
    return found[0]


def keys(environ: Mapping[str, str]) -> object:
    """The keys for S3. If they are not in the file, no machine is asked for others."""
    return find_keys(StorageOptions(), {"AWS_EC2_METADATA_DISABLED": "true", **environ}).current()


@pytest.mark.parametrize("kind", _KINDS)
def test_the_shared_file_in_the_home_folder(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names it, although the user has named no file."""
    path = plant(tmp_path / "home" / ".aws" / "credentials", kind)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    error = failure_of(lambda: keys({}))
    assert isinstance(error, AccessDeniedError)
    assert str(path) in str(error)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(
    "variable",
    ["AWS_SHARED_CREDENTIALS_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"],
)
def test_a_file_of_a_variable(variable: str, kind: str, tmp_path: Path) -> None:
    path = plant(tmp_path / "shared" / "file", kind)
    nowhere = "http://127.0.0.1:9"
    others = {
        "AWS_WEB_IDENTITY_TOKEN_FILE": {"AWS_ROLE_ARN": "r", "AWS_ENDPOINT_URL_STS": nowhere},
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": {"AWS_CONTAINER_CREDENTIALS_FULL_URI": nowhere},
    }
    error = failure_of(lambda: keys({variable: str(path), **others.get(variable, {})}))
    assert isinstance(error, AccessDeniedError)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(
    ("location", "variable"),
    [
        ("gs://bucket/run", ""),
        ("gs://bucket/run", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("gs://bucket/run", "google_service_account_path"),
        ("az://bucket/run", "AZURE_FEDERATED_TOKEN_FILE"),
    ],
)
def test_a_file_that_obstore_reads(
    location: str, variable: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plant(tmp_path / ".config" / "gcloud" / "application_default_credentials.json", kind)
    if variable:
        monkeypatch.setenv(variable, str(path))
    else:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    error = failure_of(lambda: ObjectStore(parse_location(location), StorageOptions()))
    assert isinstance(error, AccessDeniedError)
    assert str(path) in str(error)


def test_files_of_the_user_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a volume of Kubernetes: a folder like /tmp, in which a link of root leads to a file of root."""
    volume = tmp_path / "volume"
    (volume / "..data").mkdir(parents=True)
    volume.chmod(0o1777)
    (volume / "..data" / "keys").write_text(_KEYS)
    (volume / "keys").symlink_to(Path("..data", "keys"))
    found = find_keys(StorageOptions(), {"AWS_SHARED_CREDENTIALS_FILE": str(volume / "keys")}).current()
    assert found.access_key_id == "STRANGER"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(volume / "keys"))
    files = KeyFiles(parse_location("gs://bucket/run"))
    assert Path(files.options["application_credentials"]).read_text() == _KEYS


class _Store(http.server.BaseHTTPRequestHandler):
    """A store, and a token service, of Google or Azure: notes what it is sent, and has no object."""

    protocol_version = "HTTP/1.1"
    received: ClassVar[list[str]] = []

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.received.append(f"{self.path} {body}")
        answer = b'{"access_token": "T", "expires_in": 0, "token_type": "Bearer"}'
        self.send_response(200 if self.command == "POST" else 404)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *args: object) -> None:
        """Write no log of requests."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(_Store, "received", [])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Store) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def log_in_at(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_BASE_URL", server)
    azure = {"ACCOUNT_NAME": "abc", "CLIENT_ID": "i", "TENANT_ID": "t", "AUTHORITY_HOST": server, "ENDPOINT": server}
    for name, value in azure.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_file_that_is_replaced_after_it_was_checked(
    scheme: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore opens it again for the first request."""
    path = tmp_path / "shared" / "keys"
    path.parent.mkdir()
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {"type": "service_account", "client_email": "USERS", "private_key": key.decode(), "private_key_id": "1"}
    google = {**account, "token_uri": f"{server}/users", "gcs_base_url": server}
    path.write_text(json.dumps(google) if scheme == "gs" else "USERS")
    named = "GOOGLE_APPLICATION_CREDENTIALS" if scheme == "gs" else "AZURE_FEDERATED_TOKEN_FILE"
    monkeypatch.setenv(named, str(path))
    log_in_at(server, monkeypatch)
    store = ObjectStore(parse_location(f"{scheme}://bucket/run"), StorageOptions(request_timeout_s=5))
    path.unlink()
    path.parent.chmod(0o1777)
    stranger = {**google, "client_email": "STRANGER", "token_uri": f"{server}/stranger"}
    path.write_text(json.dumps(stranger) if scheme == "gs" else "STRANGER")
    os.chown(path, _STRANGER, _STRANGER)
    error = failure_of(lambda: store.stat("x", deadline_s=clock.monotonic_s() + 5))
    assert not [one for one in _Store.received if "stranger" in one.lower()]
    assert isinstance(error, AccessDeniedError)


def test_a_token_that_was_renewed(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubernetes does it; obstore reads the new one, although it has no path to it."""
    path = tmp_path / "token"
    path.write_text("FIRST")
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(path))
    log_in_at(server, monkeypatch)
    store = ObjectStore(parse_location("az://bucket/run"), StorageOptions(request_timeout_s=5))
    for token in ("FIRST", "SECOND"):
        (tmp_path / "new").write_text(token)
        os.replace(tmp_path / "new", path)
        with pytest.raises(ObjectNotFoundError):
            store.stat("x", deadline_s=clock.monotonic_s() + 5)
    assert [one for one in _Store.received if "client_assertion=FIRST" in one]
    assert [one for one in _Store.received if "client_assertion=SECOND" in one]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", ["token", "ca"])
def test_a_file_for_the_controller(name: str, kind: str, tmp_path: Path) -> None:
    path = plant(tmp_path / "shared" / "file", kind)
    (tmp_path / "token").write_text("TOKEN")
    files = {"token": tmp_path / "token", "ca": None, name: path}
    token = files["token"]
    assert token is not None
    error = failure_of(lambda: StatusTarget(url="http://127.0.0.1:9", token=token, ca=files["ca"]).send(b"{}"))
    assert isinstance(error, OSError)
    assert any(word in str(error) for word in ("another user", "not a file", "more than"))


@pytest.mark.parametrize("kind", _KINDS)
def test_the_secret_of_a_job(kind: str, tmp_path: Path) -> None:
    """The stranger would know it, and could join the job."""
    path = plant(tmp_path / "shared" / "file", kind)
    error = failure_of(lambda: agree_on_secret(RunSettings(), environ={SECRET_FILE: str(path)}))
    assert isinstance(error, UsageError)


def test_a_token_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    error = failure_of(lambda: StatusTarget(url="http://127.0.0.1:9", token=tmp_path / "token").send(b"{}"))
    assert isinstance(error, OSError)
    assert not isinstance(error, SafepointError)


@pytest.mark.parametrize("kind", ["stranger's", "of everyone"])
def test_the_certificate_of_the_dashboard(kind: str, tmp_path: Path) -> None:
    """Its owner would know the key, and could pretend to be the dashboard."""
    path = tmp_path / "shared" / "tls.pem"
    if kind == "stranger's" and os.getuid() != 0:
        pytest.skip("only root can become another user")
    path.parent.mkdir(mode=0o755)
    path.write_text("a key")
    if kind == "stranger's":
        path.parent.chmod(0o1777)
        os.chown(path, _STRANGER, _STRANGER)
    else:
        path.chmod(0o666)
    with pytest.raises(UsageError, match="nothing was started"):
        DashboardSettings(tls_certificate=path, tls_key=path)
