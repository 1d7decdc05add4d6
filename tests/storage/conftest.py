"""The stores that every contract test runs on: a folder, moto, moto through obstore, Ceph RGW and MinIO."""

import uuid
from pathlib import Path

import pytest

from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location, Scheme
from safepoint.storage.store import Store
from tests.support.library_store import library_store


@pytest.fixture(
    params=[
        "folder",
        "moto",
        "library",
        pytest.param("rgw", marks=pytest.mark.s3),
        pytest.param("minio", marks=[pytest.mark.s3, pytest.mark.minio]),
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "folder":
        return LocalStore(Location(scheme=Scheme.FILE, path=str(tmp_path / "store")))
    if request.param == "library":
        return library_store(request.getfixturevalue("moto"), f"tests/{uuid.uuid4().hex}", monkeypatch)
    return request.getfixturevalue(request.param).store(f"tests/{uuid.uuid4().hex}")
