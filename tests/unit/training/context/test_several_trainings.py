"""Of several trainings in one script, what is missing of an earlier one decides the exit code too."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.errors import ExitCode
from safepoint.foundation.environment import Place
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import Location, Scheme
from safepoint.training.context.session import Session
from safepoint.training.rank import _finish_uploads
from safepoint.training.start.claim import join_store
from tests.support.checkpoints import prepared


def mover(*, arrives: bool, folder: Path) -> Any:
    """One that has ended; what it did is injected."""
    return SimpleNamespace(
        location="s3://bucket/run", folder=str(folder), finish=lambda newest_only, deadline_s: arrives
    )


@pytest.mark.parametrize(
    ("arrives", "missing", "code", "words"),
    [
        (True, None, ExitCode.OK, ""),
        (True, "the first model is not there", ExitCode.STORAGE, "the first model is not there"),
        (False, None, ExitCode.STORAGE, "uploads to s3://bucket/run did not finish"),
    ],
)
def test_the_first_of_two_decides_too(
    arrives: bool,
    missing: str | None,
    code: int,
    words: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the second and the third have brought everything to the store."""
    for name, value in (("handlers", []), ("level", logging.INFO), ("propagate", True)):
        monkeypatch.setattr(logging.getLogger("safepoint"), name, value)  # a session sets it up
    session = Session(RunSettings.from_environment(), Place())
    session.log.propagate = True
    session.uploads = mover(arrives=arrives, folder=tmp_path)
    session.final_missing = missing
    for number in (2, 3):
        output = prepared(tmp_path / str(number))
        join_store(session, output, Location(scheme=Scheme.FILE, path=str(tmp_path / f"store-{number}")))
        assert session.final_missing is None
        session.uploads = mover(arrives=True, folder=output.root)
    assert _finish_uploads(session, ExitCode.FAILED) == ExitCode.FAILED
    assert _finish_uploads(session, ExitCode.OK) == code
    assert words in caplog.text
