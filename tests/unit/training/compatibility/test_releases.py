"""Which releases are refused, and which cause a warning."""

import logging

import pytest

from safepoint.errors import SafepointError
from safepoint.training.compatibility.releases import TESTED, check_release


@pytest.mark.parametrize("version", ["4.57.6", "4.57.0.dev0", "5.0.0", "5.23.1", "5.9"])
def test_a_tested_release_passes(version: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without a word."""
    check_release("transformers", version=version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["4.56.2", "3", "4.9.1"])
def test_an_older_release_is_refused(version: str) -> None:
    """With the release, the reason and the command to run."""
    with pytest.raises(SafepointError, match=rf"transformers {version} is too old.* 'transformers>=4.57'"):
        check_release("transformers", version=version)


@pytest.mark.parametrize("version", ["5.24.0", "6.0.0rc1", "5.100"])
def test_a_newer_release_is_reported(version: str, caplog: pytest.LogCaptureFixture) -> None:
    """Training begins: whether all that is needed is there is checked elsewhere."""
    with caplog.at_level(logging.WARNING, logger="safepoint"):
        check_release("transformers", version=version)
    assert f"transformers {version} is newer than 5.23" in caplog.text


def test_the_installed_releases_pass() -> None:
    """Also in the environments of the oldest and the newest set."""
    for name in TESTED:
        check_release(name)
