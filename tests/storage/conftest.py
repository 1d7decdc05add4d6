"""The stores that every contract test runs on: a folder, moto, Ceph RGW and MinIO."""

import uuid
from pathlib import Path

import pytest

from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location, Scheme
from safepoint.storage.store import Store


@pytest.fixture(
    params=[
        "folder",
        "moto",
        pytest.param("rgw", marks=pytest.mark.s3),
        pytest.param("minio", marks=[pytest.mark.s3, pytest.mark.minio]),
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return LocalStore(Location(scheme=Scheme.FILE, path=str(tmp_path / "store")))
    return request.getfixturevalue(request.param).store(f"tests/{uuid.uuid4().hex}")
