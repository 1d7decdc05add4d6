"""All checks together: what is reported about a check that does not answer."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.doctor import examination
from safepoint.doctor.finding import Finding, Status


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The check of image locks hangs until the event is set; the checks of programs answer at once."""
    fine = Finding(check="stub", status=Status.OK, found="fine", why="a stub")
    release = threading.Event()

    def locks(_images: Path) -> Finding:
        release.wait()
        return fine

    monkeypatch.setattr(examination, "_FOLDER_S", 0.05)
    monkeypatch.setattr(examination, "examine_locks", locks)
    monkeypatch.setattr(examination, "examine_criu", lambda: fine)
    monkeypatch.setattr(examination, "examine_namespaces", lambda: fine)
    monkeypatch.setattr(examination, "look_at_torch", lambda: "not installed")
    monkeypatch.setattr(examination, "judge_torch", lambda _torch: fine)
    monkeypatch.setattr(examination, "look_at_gpus", lambda: "none")
    monkeypatch.setattr(examination, "judge_gpus", lambda _gpus, _torch: fine)
    monkeypatch.setattr(examination, "judge_checkpoint_api", lambda _gpus: fine)
    yield release
    release.set()


@pytest.mark.usefixtures("hangs")
def test_locks_that_do_not_answer_are_a_problem_of_the_folder(tmp_path: Path) -> None:
    """The finding names the folder, and its fix concerns the folder, not a driver."""
    findings = examination.examine(None, grace_s=30.0, margin_s=3.0, images=tmp_path)
    (locks,) = (one for one in findings if one.check == "image locks")
    assert locks.status is Status.WARNING
    assert str(tmp_path) in locks.found
    assert "local disk" in (locks.fix or "")
