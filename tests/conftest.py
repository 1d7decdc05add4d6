"""The S3 servers, one of each in every lane, and the patience of tests."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.ceph_rgw import CephRgw, ceph_rgw
from tests.support.minio import Minio
from tests.support.minio import minio as running_minio
from tests.support.moto_server import MotoServer, moto_server
from tests.support.patience import PATIENCE
from tests.support.s3_server import S3Server

pytest.register_assert_rewrite("tests.support.equality")

# A test asserts no duration: on a busy machine any example may take long.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What a test waits for ends before the test does, and can say what it was."""
    usual_s = float(config.getini("timeout"))
    for item in items:
        given = item.get_closest_marker("timeout")
        limit_s = given.args[0] if given is not None else usual_s
        item.add_marker(pytest.mark.timeout(limit_s * PATIENCE), append=False)


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    with moto_server(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def rgw() -> Iterator[CephRgw]:
    with ceph_rgw() as server:
        yield server


@pytest.fixture(scope="session")
def minio() -> Iterator[Minio]:
    with running_minio() as server:
        yield server


@pytest.fixture(
    params=[
        "moto",
        pytest.param("rgw", marks=pytest.mark.s3),
        pytest.param("minio", marks=[pytest.mark.s3, pytest.mark.minio]),
    ]
)
def server(request: pytest.FixtureRequest) -> S3Server:
    """Each S3 server in turn, for tests of object stores only."""
    return request.getfixturevalue(request.param)
