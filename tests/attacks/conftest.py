"""Runs of attacks whose ranks start in both ways: as new processes, and copied from a template (`--preload`)."""

import pytest


@pytest.fixture(params=["0", "1"], ids=["new", "copied"])
def start_of_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs twice: a rank that is copied gets its folders, paths and variables on another way."""
    monkeypatch.setenv("SAFEPOINT_PRELOAD", request.param)
