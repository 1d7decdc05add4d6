"""What one test sets in the environment, the next one does not see."""

import os
from collections.abc import Iterator

import pytest

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
