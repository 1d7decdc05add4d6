"""A user of a test's own, whose jobs have no processes. A conftest imports the fixture."""

from pathlib import Path

import pytest

from safepoint.jobs.local import local_jobs


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without jobs; no supervisor is started."""
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("SAFEPOINT_CPU_SLOTS", "8")
    monkeypatch.setenv("SAFEPOINT_GPU_SLOTS", "0")
    monkeypatch.setattr(local_jobs, "start_missing_supervisors", lambda history: [])
    monkeypatch.setattr(local_jobs, "start_supervisor", lambda name: None)
    return tmp_path
