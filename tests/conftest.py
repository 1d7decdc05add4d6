"""The S3 servers, one of each for all tests that ask for it."""

from collections.abc import Iterator

import pytest

from tests.support.ceph_rgw import CephRgw, ceph_rgw
from tests.support.moto_server import MotoServer, moto_server

pytest.register_assert_rewrite("tests.support.equality")


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    with moto_server(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def rgw() -> Iterator[CephRgw]:
    with ceph_rgw() as server:
        yield server
