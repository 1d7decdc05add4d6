"""What one test changes in its process, the next one does not see: the environment, and the priority."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.foundation.priority import Priority

AUTOGROUP = Path("/proc/self/autogroup")
pytestmark = pytest.mark.usefixtures("_set_for_the_module")


@pytest.fixture(scope="module")
def _set_for_the_module() -> Iterator[None]:
    os.environ["SET_BY_A_FIXTURE"] = "1"
    yield
    assert os.environ["SET_BY_A_FIXTURE"] == "1"


def test_first() -> None:
    os.environ["SET_BY_A_TEST"] = "1"
    os.environ.pop("PATH")


def test_second() -> None:
    assert "SET_BY_A_TEST" not in os.environ
    assert "PATH" in os.environ
    assert os.environ["SET_BY_A_FIXTURE"] == "1"


def test_the_priority_stays() -> None:
    """Of the process, and of its session."""
    before = os.nice(0), AUTOGROUP.read_text() if AUTOGROUP.exists() else ""
    Priority().lower()
    assert (os.nice(0), AUTOGROUP.read_text() if AUTOGROUP.exists() else "") == before
