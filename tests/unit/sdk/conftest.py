"""A machine of a test's own: no jobs, no connections, two processors."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("STATE", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "SAFEPOINT_PVC_MOUNTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SAFEPOINT_CPU_SLOTS", "2")
    monkeypatch.setenv("SAFEPOINT_GPU_SLOTS", "0")
    monkeypatch.chdir(tmp_path)
    return tmp_path
