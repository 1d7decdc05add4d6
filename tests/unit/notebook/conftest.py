"""A machine of a test's own, whose jobs have no processes."""

from pathlib import Path

import pytest

from safepoint.jobs.local import local_jobs
from safepoint.sdk import LocalConfig, TrainerClient


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("SAFEPOINT_CPU_SLOTS", "8")
    monkeypatch.setenv("SAFEPOINT_GPU_SLOTS", "0")
    monkeypatch.setattr(local_jobs, "start_missing_supervisors", lambda history: [])
    monkeypatch.setattr(local_jobs, "start_supervisor", lambda name: None)
    return tmp_path


@pytest.fixture
def client(home: Path) -> TrainerClient:
    return TrainerClient(LocalConfig())
