"""A job is resumed from an older checkpoint: what is refused, and what the next start is given."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import CheckpointError, ConflictError, NotFoundError, UnsupportedError
from safepoint.jobs.local import local_jobs, newest_state
from safepoint.jobs.local.chosen_checkpoint import choice_of
from safepoint.jobs.local.history import History
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.supervisor import Supervisor
from safepoint.jobs.model.records import RequestedAction
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.states import JobState
from safepoint.settings.run_settings import RunSettings
from tests.support.checkpoints import commit, prepared


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def jobs(tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalJobs]:
    """A suspended job with three checkpoints, whose supervisor does not start."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(local_jobs, "start_missing_supervisors", lambda history: [])
    monkeypatch.setattr(local_jobs, "start_supervisor", lambda name: None)
    for step in (10, 20, 30):
        commit(prepared(output), step)
    settings = RunSettings(output_dir=str(output), from_scratch=True)
    spec = JobSpec(name="tiny", program=("a.py",), python=sys.executable, working_dir="/", settings=settings)
    with History() as history:
        history.add(spec, actor="test")
        history.request("tiny", RequestedAction.SUSPEND, actor="test")
        history.become("tiny", JobState.SUSPENDED, actor="test", safe_step=30)
    with LocalJobs(actor="ada") as jobs:
        yield jobs


def test_the_next_start_resumes_from_it(jobs: LocalJobs, output: Path) -> None:
    """By a mark of its own, because the job has been started before; the event names the checkpoint."""
    job = jobs.resume("tiny", step=10)
    assert job.state is JobState.QUEUED
    assert job.spec.settings.resume == str(output / "checkpoint-10")
    assert not job.spec.settings.from_scratch
    assert job.spec.resume_mark is not None
    [changed] = [event for event in jobs.events("tiny") if event.name == "changed"]
    assert (changed.actor, changed.cause) == ("ada", f"resumes from {output}/checkpoint-10")
    assert JobSpec.from_json(job.spec.to_json()) == job.spec


def test_a_later_resume_takes_the_newest_one(jobs: LocalJobs) -> None:
    """A choice whose start has not happened does not count any more."""
    marked = jobs.resume("tiny", step=10).spec
    with History() as history:
        history.become("tiny", JobState.FAILED, actor="test")
    assert jobs.resume("tiny", step=20).spec.resume_mark != marked.resume_mark
    with History() as history:
        history.become("tiny", JobState.FAILED, actor="test")
    job = jobs.resume("tiny")
    assert (job.spec.settings.resume, job.spec.resume_mark) == ("auto", None)
    assert jobs.events("tiny")[-1].name != "changed" or jobs.events("tiny")[-1].cause.endswith("newest checkpoint")


@pytest.mark.parametrize("options", [{"step": 10}, {"from_checkpoint": True}, {}])
def test_a_job_that_is_frozen_after_the_choice(
    options: dict[str, Any], jobs: LocalJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice is made while the job is still being suspended. The image that is made then is not used; it is used
    if nothing was chosen."""
    image = "/images/image-1"
    monkeypatch.setattr(newest_state, "choose", lambda *_: newest_state.NewestState(image=image, why=""))
    with History() as history:
        history.become("tiny", JobState.SUSPENDING, actor="test", attempt=1)
        jobs.resume("tiny", **options)
        history.note_image("tiny", image, actor="test")
        history.become("tiny", JobState.QUEUED, actor="test")
        Supervisor("tiny", history)._take(history.job("tiny"))
        job = history.job("tiny")
    assert (job.state, job.attempt, job.image) == (JobState.RESUMING, *((2, None) if options else (1, image)))
    assert not job.from_checkpoint


def test_what_would_be_moved_aside(jobs: LocalJobs, output: Path) -> None:
    choice = choice_of(jobs.job("tiny"), str(output), 10)
    assert (choice.step, choice.newer) == (10, ("checkpoint-30", "checkpoint-20"))
    assert choice_of(jobs.job("tiny"), str(output), 30).newer == ()


def test_what_is_refused(jobs: LocalJobs, output: Path) -> None:
    """Nothing is changed then."""
    before = jobs.job("tiny")
    with pytest.raises(NotFoundError, match="there is no checkpoint-15"):
        jobs.resume("tiny", step=15)
    next(path for path in (output / "checkpoint-20").iterdir() if path.suffix != ".json").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-20 is not a complete checkpoint: .*; nothing was changed"):
        jobs.resume("tiny", step=20)
    assert jobs.job("tiny") == before
    for location in (None, "s3://bucket/run"):
        with pytest.raises(UnsupportedError, match="only a job with an output folder can resume from an older"):
            choice_of(before, location, 10)
    with History() as history:
        history.become("tiny", JobState.RUNNING, actor="test")
        history.request("tiny", RequestedAction.RUN, actor="test")
    with pytest.raises(ConflictError, match="is Running, not suspended"):
        jobs.resume("tiny", step=10)
    assert replace(jobs.job("tiny").spec) == before.spec


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_checkpoint_of_another_user_in_a_shared_folder(jobs: LocalJobs, output: Path) -> None:
    """Another user may have put it there under the step of a checkpoint that the job has deleted."""
    os.chmod(output, 0o1777)
    assert choice_of(jobs.job("tiny"), str(output), 20).step == 20
    os.chown(output / "checkpoint-20", 4711, 4711)
    with pytest.raises(CheckpointError, match="belongs to another user"):
        jobs.resume("tiny", step=20)
