"""How messages speak to the readers of a run, of a job, and of a job from the SDK."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint import errors
from safepoint.errors import SafepointError
from safepoint.foundation.events import console
from safepoint.foundation.events.run_events import Interrupted
from safepoint.settings.wording import use_wording


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[pytest.CaptureFixture[str]]:
    """What the console prints."""
    monkeypatch.setattr(errors, "_translate", [])
    logger = logging.getLogger("safepoint")
    before = logger.handlers[:], logger.level, logger.propagate
    console.set_up(0)
    yield capsys
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.mark.parametrize(
    ("wording", "job_dir", "again"),
    [
        ("options", None, "run the same command again"),
        ("sdk", None, "run the same command again"),
        ("options", "/state/jobs/digits", "run `safepoint resume digits`"),
        ("sdk", Path("/state/jobs/digits"), 'call resume_job("digits")'),
    ],
)
def test_the_output_of_a_job_says_how_to_continue_the_job(
    wording: str, job_dir: str | Path | None, again: str, log: pytest.CaptureFixture[str]
) -> None:
    """In lines of the log and in errors: the command of a run is not the command that has submitted the job."""
    use_wording(wording, job_dir=job_dir)
    event = Interrupted(step=20, saved=True, reason="")
    logging.getLogger("safepoint").info("%s", event.line)
    assert log.readouterr().err == f"safepoint: interrupted, state of step 20 is saved; {again} to continue\n"
    hint = SafepointError("--grace is too short", hint="free the port; run the same command again").hint
    assert hint == f"free the port; {again}"


def test_options_keep_their_names_in_a_job(log: pytest.CaptureFixture[str]) -> None:
    """Only a job from the SDK names the fields of the SDK."""
    for wording, name in (("options", "--grace"), ("sdk", "grace_period_seconds")):
        use_wording(wording, job_dir="/state/jobs/digits")
        assert SafepointError("--grace is too short").message == f"{name} is too short"
