"""Files with keys and tokens that another user has put where everyone may write, or that have no end.

The stranger's keys would be used, so that the checkpoints go to the stranger; a pipe or a device would never end.
"""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from safepoint.errors import AccessDeniedError, SafepointError, UsageError
from safepoint.settings.run_settings import RunSettings
from safepoint.storage import object_store
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
    object_store._check_key_files(parse_location("gs://bucket/run"))


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
