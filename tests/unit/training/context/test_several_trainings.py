"""Of several trainings in one script, what is missing of an earlier one decides the exit code too."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.errors import ExitCode
from safepoint.storage.location import Location, Scheme
from safepoint.training.rank import _finish_uploads
from safepoint.training.start.claim import join_store
from tests.support.checkpoints import prepared
from tests.support.contexts import rank_context


def ended_uploader(*, is_complete: bool, folder: Path) -> Any:
    """An uploader that has ended; what it did is injected."""
    plan = SimpleNamespace(location="s3://bucket/run", folder=str(folder))
    return SimpleNamespace(plan=plan, newest_only=False, finish=lambda newest_only, deadline_s: is_complete)


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
) -> None:
    """When the second and the third have uploaded everything."""
    context = rank_context()
    context.uploads.uploader = ended_uploader(is_complete=arrives, folder=tmp_path)
    if missing:
        context.uploads.final_model_missing(missing)
    for number in (2, 3):
        output = prepared(tmp_path / str(number))
        join_store(context, output, Location(scheme=Scheme.FILE, path=str(tmp_path / f"store-{number}")))
        assert context.uploads._final_missing is None
        context.uploads.uploader = ended_uploader(is_complete=True, folder=output.root)
    assert _finish_uploads(context, ExitCode.FAILED) == ExitCode.FAILED
    assert _finish_uploads(context, ExitCode.OK) == code
    assert words in caplog.text
