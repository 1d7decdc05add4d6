"""All tests in this folder freeze real processes, with CRIU, as root."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.transparent.criu.program import VARIABLE
from tests.support import ceph_rgw
from tests.support.criu import PROGRAM, unavailable
from tests.support.jobs_local import Place, jobs_in
from tests.support.s3_server import S3Server

_NUMBERS = Path("/proc/sys/kernel/pid_max")


@pytest.fixture(scope="session", autouse=True)
def many_numbers() -> Iterator[None]:
    """On a busy machine with few numbers, that of an ended process is soon taken. systemd allows as many, too."""
    before = _NUMBERS.read_text()
    _NUMBERS.write_text(str(1 << 22))
    yield
    _NUMBERS.write_text(before)


@pytest.fixture(autouse=True)
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key with which images are made is that of a new user."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Jobs that are never frozen: `alone`, and `pair` with two ranks."""
    with jobs_in(tmp_path_factory.mktemp("reference")) as place:
        for name, ranks in (("alone", 1), ("pair", 2)):
            place.jobs.submit(place.training(name, "--step-ms", "0", ranks_per_node=ranks))
        for name in ("alone", "pair"):
            place.complete(name)
        yield place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with jobs_in(tmp_path) as place:
        if PROGRAM.exists():
            os.environ[VARIABLE] = str(PROGRAM)
        yield place


@pytest.fixture(params=["moto", pytest.param("rgw", marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def bucket_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Each S3 server in turn; commands find it by their environment."""
    reason = ceph_rgw.unavailable() if request.param == "rgw" else None
    if reason is not None:
        pytest.skip(reason)
    server: S3Server = request.getfixturevalue(request.param)
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    return server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = unavailable() if own else None
    for item in own:
        item.add_marker(pytest.mark.images)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
