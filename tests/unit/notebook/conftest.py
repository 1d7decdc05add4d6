"""A client of a machine of a test's own, whose jobs have no processes."""

from pathlib import Path

import pytest

from safepoint.sdk import LocalConfig, TrainerClient
from tests.support.own_home import home

__all__ = ["client", "home"]


@pytest.fixture
def client(home: Path) -> TrainerClient:
    return TrainerClient(LocalConfig())
