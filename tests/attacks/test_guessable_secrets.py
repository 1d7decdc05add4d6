"""The object with the job's secret was not written by Safepoint, or was damaged.

With an empty secret, or one that is easy to guess, every machine in the network could join the job as a node.
"""

import secrets
from pathlib import Path

import pytest

from safepoint.errors import StorageError
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import parse_location
from safepoint.training.rendezvous import job_secret
from safepoint.training.rendezvous.job_secret import agree_on_secret

_VALUES = {
    "empty": b"",
    "short": b"1",
    "too short": b"a" * 63,
    "too long": b"a" * 65,
    "no hexadecimal digits": b"\0" * 64,
    "a line end": b"a" * 63 + b"\n",
    "large": b"a" * (1 << 20),
}


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the bucket."""
    folder = tmp_path / "bucket"
    folder.mkdir()
    monkeypatch.setattr(job_secret, "open_store", lambda *_, **__: LocalStore(parse_location(str(folder))))
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> RunSettings:
    return RunSettings(output_dir="s3://bucket/run", local_dir=str(tmp_path / "local"))


@pytest.mark.parametrize("kind", _VALUES)
def test_an_object_that_is_no_secret(kind: str, bucket: Path, settings: RunSettings) -> None:
    (bucket / ".safepoint").mkdir()
    (bucket / ".safepoint" / "job-secret").write_bytes(_VALUES[kind])
    with pytest.raises(StorageError, match=r"is not a secret that|more than"):
        agree_on_secret(settings, environ={})
    assert (bucket / ".safepoint" / "job-secret").read_bytes() == _VALUES[kind], "the object stays"


def test_the_secret_of_the_first_node(bucket: Path, settings: RunSettings) -> None:
    first, second = (agree_on_secret(settings, environ={}) for _ in range(2))
    assert first == second
    assert first.is_common
    assert len(first.value) == 64


@pytest.mark.parametrize("value", [b"\0" * 64, b"z" * 64], ids=["zeros", "letters"])
def test_a_file_in_the_output_folder(value: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with the right size whose content was lost, for example when the machine lost power."""
    monkeypatch.setattr(job_secret, "_WRITER_S", 0.0)
    settings = RunSettings(output_dir=str(tmp_path / "out"))
    agree_on_secret(settings, environ={})
    path = tmp_path / "out" / ".safepoint" / "job-secret"
    path.write_bytes(value)
    with pytest.raises(StorageError, match="it is incomplete or changed"):
        agree_on_secret(settings, environ={})
    path.write_bytes(secrets.token_hex(32).encode())
    assert path.stat().st_mode & 0o777 == 0o600
    assert agree_on_secret(settings, environ={}).value == path.read_bytes()
