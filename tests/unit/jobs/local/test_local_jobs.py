"""What commands may ask of jobs on this machine, without one that runs."""

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.errors import (
    ConflictError,
    NotFoundError,
    SafepointError,
    StorageError,
    UsageError,
    WaitTimeoutError,
)
from safepoint.foundation.files import is_locked
from safepoint.jobs.local import local_jobs
from safepoint.jobs.local.attempt.launchers import launcher_environment
from safepoint.jobs.local.history import History
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.paths import history_file, job_folder, supervisor_lock
from safepoint.jobs.model.job_progress import absolute_location
from safepoint.jobs.model.records import JobRecord, RequestedAction
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.states import JobState
from tests.support.checkpoints import commit, prepared
from tests.support.job_values import job_spec

COMPLETE, FAILED, RUNNING, SUSPENDED = JobState.COMPLETE, JobState.FAILED, JobState.RUNNING, JobState.SUSPENDED


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SAFEPOINT_GPU_SLOTS", "1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def supervisors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs for which one would have been started; none is."""
    started: list[str] = []
    monkeypatch.setattr(local_jobs, "start_supervisor", lambda name, **_: started.append(name))
    monkeypatch.setattr(local_jobs, "start_missing_supervisors", lambda history, **_: [])
    return started


@pytest.fixture
def jobs(supervisors: list[str]) -> Iterator[LocalJobs]:
    with LocalJobs(actor="me") as jobs:
        yield jobs


@pytest.fixture
def history() -> Iterator[History]:
    with History() as history:
        yield history


def known(
    history: History, name: str, state: JobState, wanted: RequestedAction = RequestedAction.RUN, **fields: Any
) -> JobSpec:
    """A job that is in this state already."""
    spec = job_spec(name, **fields)
    history.add(spec, actor="me")
    history.become(name, state, actor="me", wanted=wanted)
    job_folder(name).mkdir(parents=True)
    return spec


def test_a_state_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to set."""
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    with pytest.raises(StorageError, match=r"/dev/null/safepoint cannot be created.*set XDG_STATE_HOME"):
        LocalJobs()


class TestSubmitting:
    def test_the_job_is_there_with_its_files(self, jobs: LocalJobs, supervisors: list[str]) -> None:
        """Before anybody could start it."""
        job = jobs.submit(job_spec("a"), {"function.py": b"print(1)"})
        assert (job.state, job.wanted, supervisors) == (JobState.CREATED, RequestedAction.RUN, ["a"])
        assert (job_folder("a") / "function.py").read_bytes() == b"print(1)"
        assert job_folder("a").stat().st_mode & 0o077 == 0
        assert os.listdir(job_folder("a").parent) == ["a"]

    def test_whoever_sees_the_job_sees_its_files(
        self, jobs: LocalJobs, history: History, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Any command may start its supervisor as soon as it is in the history."""
        seen: list[bool] = []
        done = threading.Event()

        def look() -> None:
            with History() as mine:
                while not done.is_set():
                    if mine.find("a") is not None:
                        seen.append((job_folder("a") / "file").exists())
                        return

        looker = threading.Thread(target=look)
        looker.start()
        jobs.submit(job_spec("a"), {"file": b"x" * 5_000_000})
        looker.join(30)
        done.set()
        assert seen == [True]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"working_dir": "/nowhere"}, "'/nowhere' is not a folder"),
            ({"gpu_per_node": 1, "num_nodes": 2}, "needs 2 GPU slots, and this machine has 1"),
        ],
    )
    def test_what_cannot_run_is_refused(self, jobs: LocalJobs, fields: dict[str, Any], message: str) -> None:
        """Nothing is written down."""
        with pytest.raises(UsageError, match=message):
            jobs.submit(job_spec("a", **fields))
        assert jobs.jobs() == []

    def test_an_unknown_connection_is_refused(self, jobs: LocalJobs) -> None:
        """Before the job waits for an hour to find out."""
        with pytest.raises(NotFoundError, match="no data connection 'minio'"):
            jobs.submit(job_spec("a", data_connection="minio"))

    def test_two_of_one_name(self, jobs: LocalJobs) -> None:
        """The second one is refused, and touches nothing of the first."""
        jobs.submit(job_spec("a"), {"file": b"first"})
        with pytest.raises(ConflictError, match="already a job 'a'"):
            jobs.submit(job_spec("a"), {"file": b"second"})
        assert (job_folder("a") / "file").read_bytes() == b"first"
        assert os.listdir(job_folder("a").parent) == ["a"]

    @pytest.mark.parametrize("second", ["{}/out", "{}/out/", "{}/./x/../out", "file://{}/out", "{}/link", "out"])
    def test_two_into_one_folder(self, jobs: LocalJobs, tmp_path: Path, second: str) -> None:
        """However it is written."""
        (tmp_path / "out").mkdir()
        (tmp_path / "link").symlink_to("out")
        jobs.submit(job_spec("a", output_dir=str(tmp_path / "out")))
        with pytest.raises(ConflictError, match="job a writes to"):
            jobs.submit(job_spec("b", output_dir=second.format(tmp_path), working_dir=str(tmp_path)))
        assert [job.name for job in jobs.jobs()] == ["a"]

    def test_a_claim_is_the_folder_that_it_was(
        self, jobs: LocalJobs, history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another project's folder may stand for a claim of the same name, and its checkpoints are its own."""
        for project in ("mine", "theirs"):
            monkeypatch.setenv("SAFEPOINT_PVC_MOUNTS", f"data={tmp_path / project}")
            jobs.submit(job_spec(project, output_dir="pvc://data/run"))
            commit(prepared(tmp_path / project / "run"), 10)
        with pytest.raises(ConflictError, match="job theirs writes to"):
            jobs.submit(job_spec("third", output_dir=str(tmp_path / "theirs" / "run")))
        environ = launcher_environment(jobs.job("mine").spec, {}, None)
        assert environ["SAFEPOINT_PVC_MOUNTS"] == f"data={tmp_path / 'mine'}"
        history.become("mine", COMPLETE, actor="me")
        assert jobs.delete("mine", with_checkpoints=True) == 1
        assert not (tmp_path / "mine" / "run" / "checkpoint-10").exists()
        assert (tmp_path / "theirs" / "run" / "checkpoint-10").exists()

    @pytest.mark.parametrize("output", ["/dev/null/x", "file", "file/x"])
    def test_an_output_folder_that_cannot_be_one_is_refused(
        self, jobs: LocalJobs, tmp_path: Path, output: str
    ) -> None:
        """As `run` refuses it, and not an hour later."""
        (tmp_path / "file").touch()
        with pytest.raises(StorageError, match="is not a folder"):
            jobs.submit(job_spec("a", output_dir=output, working_dir=str(tmp_path)))
        assert jobs.jobs() == []

    def test_the_folder_that_the_ranks_have_told_counts_too(self, jobs: LocalJobs, tmp_path: Path) -> None:
        """Where the script decides."""
        jobs.submit(job_spec("a", working_dir=str(tmp_path)))
        (job_folder("a") / "progress.json").write_text(json.dumps({"output_dir": "there"}))
        with pytest.raises(ConflictError, match="job a writes to"):
            jobs.submit(job_spec("b", output_dir=str(tmp_path / "there")))

    def test_a_folder_is_free_when_its_job_rests(self, jobs: LocalJobs, history: History, tmp_path: Path) -> None:
        """And the one that rests is refused when it wants to go on meanwhile."""
        output = str(tmp_path / "out")
        known(history, "a", SUSPENDED, RequestedAction.SUSPEND, output_dir=output)
        jobs.submit(job_spec("b", output_dir=output))
        with pytest.raises(ConflictError, match="job b writes to"):
            jobs.resume("a")
        assert jobs.job("a").wanted is RequestedAction.SUSPEND

    def test_a_supervisor_that_does_not_start_leaves_no_job(
        self, jobs: LocalJobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The caller sees the reason, and may submit again."""

        def fail(name: str, **_: object) -> None:
            raise OSError("no more processes")

        with monkeypatch.context() as patch:
            patch.setattr(local_jobs, "start_supervisor", fail)
            with pytest.raises(OSError, match="no more processes"):
                jobs.submit(job_spec("a"), {"file": b"x"})
        assert jobs.jobs() == []
        assert os.listdir(job_folder("a").parent) == []
        jobs.submit(job_spec("a"))

    def test_what_an_older_job_of_the_name_has_left_is_gone(self, jobs: LocalJobs) -> None:
        """The history may have been moved aside since."""
        job_folder("a").mkdir(parents=True)
        (job_folder("a") / "events.jsonl").write_text("old")
        jobs.submit(job_spec("a"), {"file": b"new"})
        assert os.listdir(job_folder("a")) == ["file"]


class TestAsking:
    @pytest.mark.parametrize("state", [COMPLETE, FAILED])
    def test_what_has_ended_cannot_be_suspended(self, jobs: LocalJobs, history: History, state: JobState) -> None:
        """The message says what it is."""
        known(history, "a", state)
        with pytest.raises(ConflictError, match=f"it is {state}"):
            jobs.suspend("a")

    @pytest.mark.parametrize(
        ("state", "wanted", "message"),
        [
            (COMPLETE, RequestedAction.RUN, "is complete"),
            (RUNNING, RequestedAction.RUN, "is Running, not suspended"),
            (RUNNING, RequestedAction.PREEMPT, "is Running, not suspended"),
            (SUSPENDED, RequestedAction.DELETE, "is being deleted"),
        ],
    )
    def test_what_cannot_be_resumed(
        self, jobs: LocalJobs, history: History, state: JobState, wanted: RequestedAction, message: str
    ) -> None:
        """And is left as it is."""
        known(history, "a", state, wanted)
        with pytest.raises(ConflictError, match=message):
            jobs.resume("a")
        assert (jobs.job("a").state, jobs.job("a").wanted) == (state, wanted)

    def test_a_failed_job_is_tried_again(self, jobs: LocalJobs, history: History, supervisors: list[str]) -> None:
        """With all its setbacks forgiven."""
        known(history, "a", FAILED)
        history.become("a", FAILED, actor="me", setbacks=6)
        job = jobs.resume("a")
        assert (job.state, job.wanted, job.setbacks) == (JobState.QUEUED, RequestedAction.RUN, 0)
        assert supervisors == ["a"]

    def test_nothing_can_be_asked_of_a_job_that_is_being_deleted(self, jobs: LocalJobs, history: History) -> None:
        """Or its deletion would never end."""
        known(history, "a", RUNNING, RequestedAction.DELETE)
        with pytest.raises(ConflictError, match="being deleted"):
            jobs.suspend("a")
        with pytest.raises(ConflictError, match="being deleted"):
            jobs.scale("a", 2)
        assert jobs.job("a").wanted is RequestedAction.DELETE

    def test_a_suspension_that_somebody_takes_back_is_not_waited_for(self, jobs: LocalJobs, history: History) -> None:
        """For ever, it would be."""
        known(history, "a", RUNNING)
        with done_when(lambda history: history.job("a").wanted is RequestedAction.SUSPEND, _let_run):
            with pytest.raises(ConflictError, match="another command requested run"):
                jobs.suspend("a", timeout_s=30)

    def test_a_wait_that_takes_too_long(self, jobs: LocalJobs, history: History) -> None:
        """The request stands."""
        known(history, "a", RUNNING)
        with pytest.raises(WaitTimeoutError, match=r"not suspended within 0\.2 s; it is Running"):
            jobs.suspend("a", timeout_s=0.2)
        assert jobs.job("a").wanted is RequestedAction.SUSPEND

    def test_scaling_what_rests_changes_only_the_number(
        self, jobs: LocalJobs, history: History, supervisors: list[str]
    ) -> None:
        """It goes on when somebody says so."""
        known(history, "a", SUSPENDED, RequestedAction.SUSPEND, priority=3)
        job = jobs.scale("a", 4)
        assert (job.spec.num_nodes, job.spec.priority, job.state, supervisors) == (4, 3, SUSPENDED, [])
        with pytest.raises(UsageError, match="num_nodes 0"):
            jobs.scale("a", 0)
        known(history, "b", COMPLETE)
        with pytest.raises(ConflictError, match="is complete"):
            jobs.scale("b", 2)

    def test_scaling_does_not_resume_what_failed(
        self, jobs: LocalJobs, history: History, supervisors: list[str]
    ) -> None:
        """That is another command."""
        known(history, "a", FAILED)
        job = jobs.scale("a", 2)
        assert (job.spec.num_nodes, job.state, supervisors) == (2, FAILED, [])

    def test_scaling_what_runs_is_one_entry(self, jobs: LocalJobs, history: History, supervisors: list[str]) -> None:
        """It continues when no command waits for it any more, as the message says."""
        known(history, "a", RUNNING)
        for _ in range(2):
            with pytest.raises(WaitTimeoutError, match=r"not scaled to 2 nodes within 0\.1 s.*stay in effect"):
                jobs.scale("a", 2, timeout_s=0.1)
        job = jobs.job("a")
        assert (job.target_nodes, job.spec.num_nodes, job.wanted) == (2, 1, RequestedAction.RUN)
        assert [event.name for event in history.events("a")].count("scale_requested") == 1
        assert "a" in supervisors

    def test_scaling_what_ends_first(self, jobs: LocalJobs, history: History, supervisors: list[str]) -> None:
        """It is said, and nothing is started."""
        known(history, "a", RUNNING)
        supervise = lambda _: history.become("a", FAILED, actor="it", message="exit code 3")  # noqa: E731
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_jobs, "start_supervisor", supervise)
            with pytest.raises(ConflictError, match="was not scaled to 2 nodes: it is Failed: exit code 3"):
                jobs.scale("a", 2)

    def test_what_goes_on_waits_for_its_turn_at_once(
        self, jobs: LocalJobs, history: History, supervisors: list[str]
    ) -> None:
        """No command sees a job that rests and is to run."""
        known(history, "a", SUSPENDED, RequestedAction.SUSPEND)
        job = jobs.resume("a")
        assert (job.state, job.wanted, job.needs_supervisor) == (JobState.QUEUED, RequestedAction.RUN, True)


class TestWaiting:
    def test_what_it_will_not_come_to_by_itself_is_an_error(self, jobs: LocalJobs, history: History) -> None:
        """With the reason that the job gives."""
        known(history, "a", FAILED)
        history.become("a", FAILED, actor="me", message="exit code 3")
        with pytest.raises(SafepointError, match="job a is Failed: exit code 3"):
            jobs.wait("a", [COMPLETE])
        assert jobs.wait("a", [FAILED, COMPLETE]).state is FAILED

    def test_watchers_see_every_look(self, jobs: LocalJobs, history: History) -> None:
        """The first one too."""
        known(history, "a", COMPLETE)
        seen: list[JobRecord] = []
        jobs.wait("a", [COMPLETE], look=seen.append)
        assert [job.state for job in seen] == [COMPLETE]

    def test_a_job_that_is_deleted_meanwhile_is_not_what_was_waited_for(
        self, jobs: LocalJobs, history: History
    ) -> None:
        """And its namesake is not the job."""
        known(history, "a", RUNNING)
        known(history, "a-2", COMPLETE)

        looked = threading.Event()
        with done_when(lambda _: looked.is_set(), lambda history: history.forget("a")):
            with pytest.raises(NotFoundError, match="job a was deleted"):
                jobs.wait("a", [COMPLETE], timeout_s=30, look=lambda _: looked.set())


class TestDeleting:
    @pytest.mark.parametrize("state", [COMPLETE, FAILED, SUSPENDED, JobState.QUEUED, JobState.CREATED])
    def test_a_job_without_processes_is_removed_at_once(
        self, jobs: LocalJobs, history: History, supervisors: list[str], state: JobState
    ) -> None:
        """With its folder, and without a supervisor."""
        known(history, "a", state)
        jobs.delete("a")
        assert jobs.jobs() == []
        assert not job_folder("a").exists()
        assert supervisors == []

    def test_one_with_processes_is_left_to_its_supervisor(
        self, jobs: LocalJobs, history: History, supervisors: list[str]
    ) -> None:
        """Which is started when there is none."""
        known(history, "a", RUNNING)
        with pytest.raises(WaitTimeoutError, match="not deleted"):
            jobs.delete("a", timeout_s=0.1)
        assert jobs.job("a").wanted is RequestedAction.DELETE
        assert "a" in supervisors

    def test_an_entry_that_cannot_be_read_can_be_deleted(self, jobs: LocalJobs, history: History) -> None:
        """There is no other way to be rid of it."""
        known(history, "a", FAILED)
        with sqlite3.connect(history_file()) as db:
            db.execute("UPDATE job SET spec = 'torn'")
        db.close()
        with pytest.raises(StorageError):
            jobs.job("a")
        jobs.delete("a")
        assert not history.knows("a")
        assert not job_folder("a").exists()

    def test_checkpoints_are_looked_for_where_the_job_ran(
        self, jobs: LocalJobs, history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A relative folder is relative to the job's folder, not to that of the deleting command."""
        for place in ("there", "here"):
            commit(prepared(tmp_path / place / "out"), 10)
        monkeypatch.chdir(tmp_path / "here")
        known(history, "a", COMPLETE, output_dir="out", working_dir=str(tmp_path / "there"))
        jobs.delete("a", with_checkpoints=True)
        assert not (tmp_path / "there" / "out" / "checkpoint-10").exists()
        assert (tmp_path / "here" / "out" / "checkpoint-10").exists()

    def test_how_many_checkpoints_went_is_said(self, jobs: LocalJobs, history: History, tmp_path: Path) -> None:
        """Not just that it was asked for."""
        for step in (10, 20):
            commit(prepared(tmp_path / "out"), step)
        known(history, "a", COMPLETE, output_dir=str(tmp_path / "out"))
        assert jobs.delete("a", with_checkpoints=True) == 2

    def test_checkpoints_of_which_nobody_knows_are_refused(self, jobs: LocalJobs, history: History) -> None:
        """Nothing is said to be gone that may be there."""
        known(history, "a", COMPLETE)
        with pytest.raises(ConflictError, match=r"output location of job a is unknown: .*nothing was deleted"):
            jobs.delete("a", with_checkpoints=True)
        assert [job.name for job in jobs.jobs()] == ["a"]

    def test_a_place_that_fails_keeps_the_job(
        self, jobs: LocalJobs, history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So that the same command can be given again."""
        commit(prepared(tmp_path / "out"), 10)
        known(history, "a", SUSPENDED, RequestedAction.SUSPEND, output_dir=str(tmp_path / "out"))

        def fail(self: Inventory, item: object) -> bool:
            raise StorageError("the store does not answer")

        with monkeypatch.context() as patch:
            patch.setattr(Inventory, "delete", fail)
            with pytest.raises(StorageError, match="does not answer"):
                jobs.delete("a", with_checkpoints=True)
        assert (jobs.job("a").state, jobs.job("a").wanted) == (SUSPENDED, RequestedAction.SUSPEND)
        assert not is_locked(supervisor_lock("a"))
        assert jobs.delete("a", with_checkpoints=True) == 1
        assert jobs.jobs() == []

    def test_one_that_does_not_stop_in_time_keeps_its_checkpoints_and_says_so(
        self, jobs: LocalJobs, history: History, tmp_path: Path
    ) -> None:
        """The whole command is to be given again."""
        commit(prepared(tmp_path / "out"), 10)
        known(history, "a", RUNNING, output_dir=str(tmp_path / "out"))
        with pytest.raises(WaitTimeoutError, match=r"nothing was deleted.*has stopped, delete it once more"):
            jobs.delete("a", with_checkpoints=True, timeout_s=0.1)
        assert jobs.job("a").wanted is RequestedAction.SUSPEND
        assert (tmp_path / "out" / "checkpoint-10").exists()
        history.become("a", SUSPENDED, actor="me")
        assert jobs.delete("a", with_checkpoints=True) == 1

    def test_a_folder_that_cannot_be_used_leaves_the_job_as_it_was(self, jobs: LocalJobs, history: History) -> None:
        """It is not said to be deleted for ever after."""
        known(history, "a", COMPLETE)
        supervisor_lock("a").mkdir()
        with pytest.raises(StorageError, match=r"of job a cannot be used.*nothing was done"):
            jobs.delete("a")
        assert jobs.job("a").wanted is RequestedAction.RUN

    def test_a_folder_that_cannot_be_removed_keeps_the_job(
        self, jobs: LocalJobs, history: History, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing unknown is left."""
        known(history, "a", COMPLETE)

        def fail(path: Path, **_: object) -> None:
            raise OSError(16, "Device or resource busy", str(path / "mount"))

        with monkeypatch.context() as patch:
            patch.setattr("shutil.rmtree", fail)
            with pytest.raises(StorageError, match=r"busy.*/mount; the job was not deleted"):
                jobs.delete("a")
        assert history.knows("a")
        jobs.delete("a")
        assert not history.knows("a")

    def test_checkpoints_stay_without_the_word(self, jobs: LocalJobs, history: History, tmp_path: Path) -> None:
        """They are what a job is for."""
        commit(prepared(tmp_path / "out"), 10)
        known(history, "a", COMPLETE, output_dir=str(tmp_path / "out"))
        jobs.delete("a")
        assert (tmp_path / "out" / "checkpoint-10").exists()

    @pytest.mark.parametrize("state", [SUSPENDED, RUNNING])
    def test_checkpoints_that_another_job_goes_on_with_are_refused(
        self, jobs: LocalJobs, history: History, tmp_path: Path, state: JobState
    ) -> None:
        """Nothing is deleted, the job neither."""
        commit(prepared(tmp_path / "out"), 10)
        known(history, "a", FAILED, output_dir=str(tmp_path / "out"))
        known(history, "b", state, RequestedAction.SUSPEND, output_dir=str(tmp_path / "out"))
        with pytest.raises(ConflictError, match=r"job b also uses the checkpoints in .*nothing was deleted"):
            jobs.delete("a", with_checkpoints=True)
        known(history, "c", state, RequestedAction.SUSPEND, output_dir=str(tmp_path / "out"))
        with pytest.raises(ConflictError, match=r"the jobs b, c also use the checkpoints in .*nothing was deleted"):
            jobs.delete("a", with_checkpoints=True)
        history.remove("c")
        assert (tmp_path / "out" / "checkpoint-10").exists()
        jobs.delete("a")
        assert [job.name for job in jobs.jobs()] == ["b"]


@contextlib.contextmanager
def done_when(is_time: Callable[[History], bool], act: Callable[[History], None]) -> Iterator[None]:
    """Somebody else, who waits for a moment and then does something."""

    def run() -> None:
        with History() as history:
            while not is_time(history):
                pass
            act(history)

    other = threading.Thread(target=run)
    other.start()
    try:
        yield
    finally:
        other.join(30)


def _let_run(history: History) -> None:
    history.request("a", RequestedAction.RUN, actor="you")


def test_events_of_all_are_one_story(jobs: LocalJobs) -> None:
    """Commands, supervisors and ranks in the order of time; a line that is cut is left for later."""
    jobs.submit(job_spec("a"))
    lines = [
        {"time": "2020-01-01T00:00:00.000Z", "event": "resumed", "step": 4},
        {"time": "2099-01-01T00:00:00.000Z", "event": "saved", "step": 5, "trigger": "jit"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (job_folder("a") / "events.jsonl").write_text(text + '[1]\nno json\n{"time": "x"}\n{"event": "cut')
    events = jobs.events("a")
    assert [event.name for event in events] == ["resumed", "submitted", "saved"]
    assert (events[2].cause, events[2].detail) == ("jit", {"step": 5})


def test_progress_is_what_was_told_last(jobs: LocalJobs) -> None:
    """None before, and None for what is no record."""
    jobs.submit(job_spec("a"))
    assert jobs.progress_of(jobs.job("a")) is None
    (job_folder("a") / "progress.json").write_text("[1]")
    assert jobs.progress_of(jobs.job("a")) is None
    (job_folder("a") / "progress.json").write_text('{"step": 3}')
    progress = jobs.progress_of(jobs.job("a"))
    assert progress is not None
    assert progress.step == 3


def test_places_in_full(tmp_path: Path) -> None:
    """Two texts that mean one place are equal."""
    assert absolute_location("out", str(tmp_path)) == str(tmp_path / "out")
    assert (
        absolute_location("s3://bucket//run/", "/")
        == absolute_location("S3://bucket/run", "/elsewhere")
        == "s3://bucket/run"
    )
