"""Jobs that are frozen and thawed: their history and their supervisor, with a stand-in for CRIU."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from safepoint.errors import ConflictError, FreezeError, NotFoundError, SafepointError, UsageError
from safepoint.foundation.files import write_atomic
from safepoint.foundation.processes import identify
from safepoint.jobs.local.attempt import thaw_watch
from safepoint.jobs.local.attempt.thaw_watch import ThawWatch, limit_after, longest_pause_after
from safepoint.jobs.local.images.job_images import freeze_job, image_of, images_folder, is_job, thaw_job
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.local.supervisor_start import start_supervisor
from safepoint.jobs.model.records import RequestedAction
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import PROGRESS_NAME, Progress, SaveStatistics, State, read_progress
from safepoint.transparent.criu.program import VARIABLE, Criu
from safepoint.transparent.criu.tree_dump import Restored
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.protection.keys import own_key
from tests.support.criu_images import dump
from tests.support.supervisors import supervisor_pid
from tests.unit.jobs.local.test_supervisor import Place, Thread, place, wait_until

__all__ = ["place"]
CRIU = Criu(path=str(Path(__file__).parents[4] / "support" / "stand_in_criu.sh"), version="4.2.1")


@pytest.fixture(autouse=True)
def restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files that show which processes the stand-in has restored. They are killed at the end."""
    monkeypatch.chdir(tmp_path)
    for name in ("STAND_IN_PROCESSES", "STAND_IN_FAULT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("STAND_IN_DUMPS", str(tmp_path / "dumps"))
    (tmp_path / "dumps").mkdir()
    yield tmp_path
    for path in tmp_path.rglob("restored-?"):
        subprocess.run(["kill", "-9", path.read_text().strip()], stderr=subprocess.DEVNULL, check=False)


def start(place: Place, *orders: str, name: str = "a", **fields: Any) -> list[int]:
    """A running job with dumps of its launchers; returns the launchers."""
    place.add(name, *orders, **fields)
    start_supervisor(name)
    launchers = place.wait_for_launchers(count=fields.get("num_nodes", 1), name=name)
    for pid in launchers:
        dump(place.folder / "dumps" / str(pid), {pid: b"page" * 1024})
    place.wait_for(JobState.RUNNING, name=name)
    return launchers


def freeze(name: str = "a", *, is_running_after: bool = False) -> None:
    freeze_job(CRIU, name, ImageLocation(images_folder(name)), is_running_after=is_running_after, actor="me")


def thaw(name: str = "a", *, restored: str | None = None) -> list[Restored]:
    """Restore the processes of a job; `restored` names the job whose processes are in the image."""
    path = Path(image_of(name)[1])
    with patch.dict(os.environ, {"STAND_IN_JOB": str(job_folder(restored or name))}):
        return thaw_job(CRIU, name, ImageLocation(path.parent), path.name, actor="me")


def test_a_frozen_job_is_suspended_and_goes_on_in_the_same_attempt(place: Place) -> None:
    """Both nodes. The restored processes are its launchers; when they are lost, the next attempt starts."""
    start(place, "wait 75", "wait 75", "0", "0", num_nodes=2)
    freeze()
    job = place.job()
    image = job_folder("a") / "images" / "image-1"
    assert (job.state, job.message) == (JobState.SUSPENDED, f"its process image is {image}; nothing is saved yet")
    assert image_of("a") == ("a", str(image))
    wait_until(lambda: supervisor_pid("a") is None)
    assert place.history.attempts("a")[0].ended
    trees = thaw()
    assert [tree.pid for tree in trees] == [int(Path(f"restored-{part}").read_text()) for part in range(2)]
    job = place.job()
    assert (job.state, job.attempt, job.wanted) == (JobState.RESUMING, 1, RequestedAction.RUN)
    assert place.history.attempts("a")[0].ended is None
    assert [node.process for node in place.history.nodes("a", 1)] == [identify(tree.pid) for tree in trees]
    with pytest.raises(ConflictError, match="Resuming"):
        thaw()
    for tree in trees:
        os.kill(tree.pid, signal.SIGKILL)
    job = place.wait_for(JobState.COMPLETE)
    assert (job.attempt, job.image) == (2, None)
    assert [name for name in place.states() if name != "suspending"][:4] == [
        *("running", "frozen", "suspended", "resuming"),
    ]


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may freeze a process")


@pytest.fixture
def own_criu(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is what this user and the supervisor find, and images have a key."""
    monkeypatch.setenv(VARIABLE, CRIU.path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("STAND_IN_JOB", str(job_folder("a")))


def freeze_with_key(name: str = "a", *, is_running_after: bool = False) -> None:
    location = ImageLocation(images_folder(name), own_key())
    freeze_job(CRIU, name, location, is_running_after=is_running_after, actor="me")


@needs_root
@pytest.mark.usefixtures("own_criu")
def test_resume_goes_on_from_the_image(place: Place) -> None:
    """In the same attempt, by the supervisor. After a failure, the job starts again without the image."""
    start(place, "wait 75", "0")
    freeze_with_key()
    wait_until(lambda: supervisor_pid("a") is None)
    with LocalJobs(actor="me") as jobs:
        resumed = jobs.resume("a")
    assert resumed.message.startswith(f"from {job_folder('a') / 'images' / 'image-1'}")
    assert "there is no checkpoint" in resumed.message
    restored = job_folder("a") / "restored-0"  # the supervisor's current folder
    wait_until(lambda: restored.exists() and place.job().message.startswith("restored from"))
    job = place.job()
    assert (job.state, job.attempt, job.is_thawed) == (JobState.RESUMING, 1, True)
    pid = int(restored.read_text())
    assert [node.process for node in place.history.nodes("a", 1)] == [identify(pid)]
    os.kill(pid, signal.SIGKILL)
    job = place.wait_for(JobState.COMPLETE)
    assert (job.attempt, job.image) == (2, None)


@needs_root
@pytest.mark.usefixtures("own_criu")
def test_resume_from_the_checkpoint_forgets_the_image(place: Place) -> None:
    """A person asks for it: the next attempt."""
    start(place, "wait 75", "0")
    freeze_with_key()
    wait_until(lambda: supervisor_pid("a") is None)
    with LocalJobs(actor="me") as jobs:
        assert jobs.resume("a", from_checkpoint=True).message == ""
    job = place.wait_for(JobState.COMPLETE)
    assert (job.attempt, job.image) == (2, None)
    assert not (job_folder("a") / "restored-0").exists()


@needs_root
@pytest.mark.usefixtures("own_criu")
def test_an_image_that_cannot_be_restored_is_given_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU fails. The attempt says so, and the next one starts from the newest checkpoint."""
    start(place, "wait 75", "0")
    freeze_with_key()
    wait_until(lambda: supervisor_pid("a") is None)
    monkeypatch.setenv("STAND_IN_FAULT", "restore 0 fail")
    with LocalJobs(actor="me") as jobs:
        jobs.resume("a")
    job = place.wait_for(JobState.COMPLETE)
    assert (job.attempt, job.image) == (2, None)
    assert "could not be restored" in place.history.attempts("a")[0].outcome


def test_a_job_that_runs_on_has_an_image(place: Place) -> None:
    start(place, f"until {place.folder}/go")
    freeze(is_running_after=True)
    job = place.job()
    assert (job.state, job.image) == (JobState.RUNNING, str(job_folder("a") / "images" / "image-1"))
    (place.folder / "go").touch()
    assert place.wait_for(JobState.COMPLETE).attempt == 1
    with pytest.raises(ConflictError, match="Complete"):
        image_of("a")


def test_a_job_that_was_changed_while_it_was_frozen_runs_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it was to be suspended: it saves and stops."""
    start(place, "wait 75")
    monkeypatch.setenv("STAND_IN_FAULT", "dump 0 wait")
    errors: list[SafepointError] = []

    def run() -> None:
        try:
            freeze()
        except SafepointError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(Path("dumped-0").exists)
    place.history.request("a", RequestedAction.SUSPEND, actor="me")
    Path("release").touch()
    thread.join(60)
    assert isinstance(errors[0], ConflictError)
    job = place.wait_for(JobState.SUSPENDED)
    assert (job.exit_code, job.image) == (75, None)


def test_what_cannot_be_frozen_or_restored_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that does not run, one without an image, and one whose slots are taken; and CRIU may fail."""
    place.add("waiting", "0")
    with pytest.raises(ConflictError, match="only a running job"):
        freeze("waiting")
    start(place, "wait 75", cpu_per_node=2)
    monkeypatch.setenv("STAND_IN_FAULT", "dump 0 fail")
    with pytest.raises(FreezeError, match="run on"):
        freeze()
    assert place.job().image is None
    place.history.request("a", RequestedAction.SUSPEND, actor="me")
    place.wait_for(JobState.SUSPENDED)
    with pytest.raises(NotFoundError, match="has no process image"):
        thaw()
    monkeypatch.setenv("STAND_IN_FAULT", "")
    start(place, "wait 75", name="b", cpu_per_node=2)
    freeze("b")
    start(place, f"until {place.folder}/go", name="c", cpu_per_node=2)
    with pytest.raises(ConflictError, match="cannot run now"):
        thaw("b")
    assert place.job("b").state is JobState.SUSPENDED
    assert not (job_folder("a") / "restored-0").exists()
    place.history.change_nodes(place.job("b"), 2, actor="me")
    with pytest.raises(ConflictError, match="another number of nodes"):
        thaw("b")
    (place.folder / "go").touch()
    place.wait_for(JobState.COMPLETE, name="c")


def progress(**changes: Any) -> Progress:
    plain = Progress(time="2026-01-01T00:00:00.000Z", state=State.TRAINING, step=3, step_s=0.5)
    return replace(plain, **changes)


def write(folder: Path, record: Progress) -> None:
    write_atomic(folder / PROGRESS_NAME, record.to_bytes(), durable=False)


def test_a_thawed_job_without_progress_starts_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are ended; the outcome of the attempt says why."""
    start(place, "wait 75", "0")
    pid = supervisor_pid("a")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: supervisor_pid("a") is None)
    write(job_folder("a"), progress())
    place.history.become("a", JobState.RESUMING, actor="me", image="/images/image-1")
    monkeypatch.setattr(thaw_watch, "_LEAST_S", 0.0)
    monkeypatch.setattr(thaw_watch, "_NUM_STEPS", 0)
    Thread().end()
    job = place.job()
    assert (job.state, job.attempt) == (JobState.COMPLETE, 2)
    assert "no progress" in place.history.attempts("a")[0].outcome


def test_the_limit_follows_the_pace() -> None:
    """A job without a known pace is not watched."""
    assert limit_after(None) is None
    assert limit_after(progress(step_s=None)) is None
    assert limit_after(progress()) == 60.0
    assert limit_after(progress(step_s=20.0, pause_s=5.0)) == 250.0


def test_a_long_evaluation_is_progress_while_it_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thaw_watch, "_LEAST_S", 0.0)
    monkeypatch.setattr(thaw_watch, "_NUM_STEPS", 0)
    used = [0.0]
    monkeypatch.setattr(thaw_watch, "_processor_time_of", lambda _: used[0])
    write(tmp_path, progress(state=State.EVALUATING))
    watch = ThawWatch(tmp_path / PROGRESS_NAME, list[int])
    used[0] = 1e9
    assert not watch.is_stuck()
    assert watch.is_stuck()
    write(tmp_path, progress(state=State.EVALUATING, step=4))
    assert not watch.is_stuck()


def test_an_evaluation_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses a processor, and takes ten times as long as all evaluations before."""
    monkeypatch.setattr(thaw_watch, "_processor_time_of", lambda _: now[0])
    now = [0.0]
    monkeypatch.setattr(thaw_watch.clock, "monotonic_s", lambda: now[0])
    write(tmp_path, evaluating(pause_s=5.0))
    watch = ThawWatch(tmp_path / PROGRESS_NAME, list[int])
    assert longest_pause_after(read_progress(tmp_path / PROGRESS_NAME)) == 5000.0
    for now[0] in (61.0, 130.0, 4999.0):
        assert not watch.is_stuck(), now
    now[0] = 5070.0
    assert watch.is_stuck()
    assert "within 1 h 24 m" in watch.cause
    late = ThawWatch(tmp_path / PROGRESS_NAME, list[int], is_late=True)
    now[0] += 1e6
    assert not late.is_stuck()  # the step for which it was frozen may take as long as it needs


def test_a_first_evaluation_may_take_as_long_as_it_needs() -> None:
    assert longest_pause_after(progress(state=State.EVALUATING)) is None
    assert longest_pause_after(progress(state=State.EVALUATING, pause_s=0.5)) is None  # the pauses were saves
    assert longest_pause_after(None) is None


def test_short_saves_do_not_limit_an_evaluation_to_seconds() -> None:
    assert longest_pause_after(evaluating(pause_s=0.01)) == 3600.0


def evaluating(*, pause_s: float) -> Progress:
    return progress(state=State.EVALUATING, step=110, resumed_step=10, pause_s=pause_s, eval_metrics={"loss": 1.0})


def test_a_loop_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that uses a processor and reports nothing; its keeper still completes a save."""
    monkeypatch.setattr(thaw_watch, "_LEAST_S", 0.0)
    monkeypatch.setattr(thaw_watch, "_NUM_STEPS", 0)
    write(tmp_path, progress())
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            watch = ThawWatch(tmp_path / PROGRESS_NAME, lambda: [busy.pid])
            write(tmp_path, progress(time="2026-11-27T10:00:00Z", safe_step=3, saves=SaveStatistics(count=4)))
            while not thaw_watch._processor_time_of([busy.pid]):
                assert busy.poll() is None
            assert watch.is_stuck()
            write(tmp_path, progress(step=4))
            assert not watch.is_stuck()
        finally:
            busy.kill()


def test_a_word_is_a_job_unless_it_is_a_folder_with_images(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output folder of a job often has its name."""
    place.add("a")
    folder = tmp_path / "somewhere"
    monkeypatch.chdir(made(folder))
    made(folder / "a" / "checkpoint-3")
    assert is_job("a")
    assert is_job("unknown")
    assert is_job("x" * 5000)
    made(folder / "b" / "image-3")
    found = {
        word: is_job(word) for word in ("b", "image-3", "./a", "b/image-3", "s3://bucket/images", "/a", ".", "b*")
    }
    assert [word for word, yes in found.items() if yes] == ["b*"]
    made(folder / "a" / "image-1")
    with pytest.raises(UsageError, match=r"a is a job, and a folder with images"):
        is_job("a")


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
