"""Every test of commands begins without settings of the user who runs it."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in which a test may write settings files."""
    for name in list(os.environ):
        if name.startswith(("SAFEPOINT_", "PET_")):
            monkeypatch.delenv(name)
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    # Commands may set it for what they start; whatever a test sets is taken back.
    for name in ("SAFEPOINT_PVC_MOUNTS", "SAFEPOINT_CPU_SLOTS", "SAFEPOINT_GPU_SLOTS"):
        monkeypatch.setenv(name, "")
    return folder
