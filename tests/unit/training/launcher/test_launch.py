"""What the launcher does to the environment of its ranks."""

import os

import pytest

from safepoint.settings.run_settings import STATUS_URL, RunSettings
from safepoint.training.launcher import launch


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({STATUS_URL: "https://x"}, "TRUE"),
        ({STATUS_URL: "https://x", "DISABLE_KUBEFLOW_INTEGRATION": "FALSE"}, "FALSE"),
    ],
)
def test_one_alone_posts_the_status(
    given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer's callback is off where the launcher posts, unless the user has said otherwise."""
    monkeypatch.setattr(os, "environ", dict(given))
    launch._prepare_environment(RunSettings())
    assert os.environ.get("DISABLE_KUBEFLOW_INTEGRATION") == expected
