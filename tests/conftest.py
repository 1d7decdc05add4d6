"""The S3 servers, one of each in every lane; how programs of tests begin; and the patience of tests."""

import contextlib
import faulthandler
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

from safepoint.foundation import priority
from tests.support.ceph_rgw import CephRgw, ceph_rgw
from tests.support.copies import copied_program
from tests.support.minio import Minio
from tests.support.minio import minio as running_minio
from tests.support.moto_server import MotoServer, moto_server
from tests.support.patience import PATIENCE
from tests.support.s3_server import S3Server

# Each template would import torch and transformers for one program. Programs of tests are copied from a template of
# theirs (`tests.support.copies`); tests of `--preload` name it, and cluster pods have the default.
os.environ.setdefault("SAFEPOINT_PRELOAD", "0")

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


_HARD_AFTER_S = 60


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that does not end after its time limit, because it waits for a thread or a lock, ends its process.

    The process first prints where each of its threads is. With several processes (`make test`), the other ones finish
    the tests that they have begun with, and the run fails.
    """
    limit = item.get_closest_marker("timeout")
    assert limit is not None
    output = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(limit.args[0] + _HARD_AFTER_S * PATIENCE, exit=True, file=output)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


_COUNTED = "copied programs"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With several test processes, each one reports how its programs began."""
    output: Any = getattr(session.config, "workeroutput", {})
    output[_COUNTED] = dict(copied_program.counted)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A test process has ended."""
    copied_program.counted.update(Counter(getattr(node, "workeroutput", {}).get(_COUNTED, {})))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many programs were copied, and how often each reason was one for a new process."""
    if copied_program.counted:
        texts = [f"{name} {number}" for name, number in copied_program.counted.most_common()]
        terminalreporter.write_line(f"programs of tests: {', '.join(texts)}")


@pytest.fixture(scope="module", params=["new"] if copied_program.is_off else ["copied", "new"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test runs twice: its programs are copied from a template, and are new processes."""
    before = copied_program.is_off
    copied_program.is_off = request.param == "new"
    yield
    copied_program.is_off = before


@pytest.fixture(autouse=True, scope="session")
def _priority() -> Iterator[None]:
    """A keeper or an uploader that a test makes in its own process does not lower the priority of all later tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priority, "_NICENESS", 0)
        patch.setattr(priority, "_GROUP", Path(os.devnull))
        yield


@contextlib.contextmanager
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for name in before.keys() | os.environ.keys():
        if not name.startswith("PYTEST_") and before.get(name) != os.environ.get(name):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


@pytest.fixture(autouse=True, scope="module")
def _environment_of_a_module() -> Iterator[None]:
    """As for each test: fixtures of a module can import packages, too."""
    with _same_environment():
        yield


@pytest.fixture(autouse=True)
def _environment_of_a_test() -> Iterator[None]:
    """What a package or a test sets in the environment is gone after the test.

    Otherwise the environment of programs would depend on the order of the tests. For example, scikit-learn and
    accelerate set variables when they are imported or first used.
    """
    with _same_environment():
        yield


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
