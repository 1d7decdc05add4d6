"""A disk that another program fills during a training: warned in time, thinned by policy, and no save fails."""

import contextlib
import os
import subprocess
import threading
import urllib.request
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import checkpoint_name, list_checkpoints
from safepoint.checkpoint.format.verify import has_all_files, verify
from safepoint.foundation.volumes.occupied import occupied
from safepoint.progress.record import read_progress
from tests.support.disk import filling, free_bytes, small_disk
from tests.support.equality import assert_same_run
from tests.support.jobs import Job, committed_steps, no_orphans, read_events, safepoint, tiny
from tests.support.ports import free_port

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

_LAST = 24
_TRAINING = ("--hidden", "256", "--max-steps", str(_LAST), "--grad-accum", "1", "--step-ms", "300")
_SAVES = ("--save-strategy", "steps", "--save-steps", "2")
_KEEP = ("--keep", "newest=4")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training on a disk with room."""
    output = tmp_path_factory.mktemp("reference") / "run"
    job = safepoint(output, program=tiny(output, *_TRAINING, "--save-strategy", "steps", "--save-steps", "24"))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    return output


@pytest.fixture(scope="module")
def save_bytes(reference: Path) -> int:
    """What one checkpoint of this training occupies."""
    return occupied(list_checkpoints(reference)[0]).num_bytes


def started(disk: Path, elsewhere: Path, *options: str) -> Job:
    """A training with its checkpoints on `disk`. Its script leaves its result elsewhere, at its end."""
    return safepoint(
        disk / "run",
        *("--output-dir", str(disk / "run"), *options),
        program=tiny(elsewhere / "out", *_TRAINING, *_SAVES),
        log=elsewhere / "log",
    )


def wait_with_a_good_one(job: Job) -> None:
    """Wait for the end of the job; at any time there is a complete checkpoint."""
    while job.process.poll() is None:
        found = list_checkpoints(job.output)
        # If a checkpoint was deleted between the listing and the check, the listing has changed.
        is_there = any(has_all_files(path) for path in found) or list_checkpoints(job.output) != found
        assert is_there, "the last good checkpoint was deleted"
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(0.05)


def assert_unharmed(job: Job, elsewhere: Path, reference: Path, cause: str = "") -> None:
    """No save has failed, only older checkpoints were deleted, because of `cause`, and the result is the same."""
    output = job.output
    assert job.wait() == 0, job.text
    assert read_events(output, "save_failed") == [], job.text
    assert [event["step"] for event in read_events(output, "saved")] == list(range(2, _LAST + 1, 2)), job.text
    assert read_events(output, "thinned"), job.text
    newest = 0
    for event in read_events(output):
        if event["event"] == "saved":
            newest = event["step"]
        elif event["event"] == "thinned":
            assert event["step"] < newest, "only older checkpoints are deleted"
            assert cause in event["cause"]
    assert committed_steps(output)[-1] == _LAST
    assert all(verify(path).is_valid for path in list_checkpoints(output))
    assert_same_run(elsewhere / "out", reference)


def metrics_of(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics/prometheus", timeout=20) as answer:
        return answer.read().decode()


def first_of(output: Path, *names: str) -> str:
    return next(event["event"] for event in read_events(output) if event["event"] in names)


def test_a_disk_that_fills_slowly(reference: Path, save_bytes: int, tmp_path: Path) -> None:
    """The launcher warns before a checkpoint is deleted; every save succeeds, and the result is bit-equal."""
    port = free_port()
    with small_disk(tmp_path / "disk", round(6.6 * save_bytes)) as disk:
        options = (*_KEEP, "--metrics-port", str(port))
        job = started(disk, tmp_path, *options)
        with no_orphans(job):
            job.wait_for_event("saved")
            with filling(disk / "other", round(3.6 * save_bytes), within_s=4):
                warned = job.wait_for_event("space_low")
                # The ranks pass on what the launcher found with their next progress, so this follows the event.
                sample = f'safepoint_space_low{{place="output folder",path="{disk / "run"}"}} 1'
                job.wait_for("metric of the low space", lambda: sample in metrics_of(port))
                progress = read_progress(disk / "run" / ".safepoint" / "progress.json")
                job.wait_for_event("thinned")
                wait_with_a_good_one(job)
        assert_unharmed(job, tmp_path, reference, "the next save would not fit")
        assert first_of(job.output, "space_low", "thinned") == "space_low"
    assert (warned["place"], warned["path"], warned["limit"]) == ("output folder", str(disk / "run"), "disk")
    assert warned["saves_left"] is not None
    assert f"warning: the output folder {disk / 'run'}" in job.text
    assert progress is not None
    assert next(one for one in progress.space if one.place == "output folder").is_low


@pytest.mark.long
@pytest.mark.parametrize("slots", [None, "0"], ids=["keeper", "synchronous"])
def test_a_disk_that_is_full_within_a_second(
    slots: str | None, reference: Path, save_bytes: int, tmp_path: Path
) -> None:
    """There is no time to warn. The next save deletes what it needs, with the keeper and without."""
    options = (*_KEEP, *(() if slots is None else ("--snapshot-slots", slots)))
    with small_disk(tmp_path / "disk", round(6.6 * save_bytes)) as disk:
        job = started(disk, tmp_path, *options)
        with no_orphans(job):
            job.wait_for_event("saved", step=8)
            # What is left suffices for events, and for no save.
            with filling(disk / "other", free_bytes(disk) - save_bytes // 2, within_s=0.2, num_pieces=2):
                wait_with_a_good_one(job)
        assert_unharmed(job, tmp_path, reference)


@pytest.mark.long
def test_free_space_that_jumps_up_and_down(reference: Path, save_bytes: int, tmp_path: Path) -> None:
    """Another program writes and deletes a large file all the time: no save fails, and there are few warnings."""
    with small_disk(tmp_path / "disk", round(6.6 * save_bytes)) as disk:
        job = started(disk, tmp_path, *_KEEP)
        with no_orphans(job):
            job.wait_for_event("saved", step=6)
            is_over = threading.Event()

            def jump() -> None:
                while not is_over.wait(0.7):
                    with filling(disk / "other", round(3.6 * save_bytes), within_s=0.1, num_pieces=2):
                        is_over.wait(0.7)
                    (disk / "other").unlink()

            thread = threading.Thread(target=jump)
            thread.start()
            try:
                wait_with_a_good_one(job)
            finally:
                is_over.set()
                thread.join()
        assert_unharmed(job, tmp_path, reference)
        assert 1 <= len(read_events(disk / "run", "space_low")) <= 2
        assert len(read_events(disk / "run", "space_regained")) <= 1


@pytest.mark.long
def test_a_file_system_that_runs_out_of_inodes(reference: Path, save_bytes: int, tmp_path: Path) -> None:
    """Many small files of another program: the bytes suffice, the inodes do not."""
    with small_disk(tmp_path / "disk", 20 * save_bytes, "nr_inodes=170") as disk:
        job = started(disk, tmp_path, *_KEEP)
        with no_orphans(job):
            job.wait_for_event("saved", step=4)
            (disk / "other").mkdir()
            free = os.statvfs(disk).f_favail
            for number in range(free - 42):
                (disk / "other" / str(number)).touch()
            warned = job.wait_for_event("space_low")
            wait_with_a_good_one(job)
        assert_unharmed(job, tmp_path, reference, "inodes")
    assert warned["limit"] == "inodes"


@pytest.mark.long
def test_a_disk_that_other_runs_share(reference: Path, save_bytes: int, tmp_path: Path) -> None:
    """Each run deletes only its own checkpoints; those of an ended run and of other programs stay."""
    with small_disk(tmp_path / "disk", round(9 * save_bytes)) as disk:
        first, second = disk / "first", disk / "run"
        foreign = second / "checkpoint-1"
        foreign.mkdir(parents=True)
        (foreign / "model.safetensors").write_bytes(bytes(save_bytes // 2))
        ended = safepoint(
            first, *_KEEP, program=tiny(first, *_TRAINING, *_SAVES, "--max-steps", "4"), log=tmp_path / "first"
        )
        with no_orphans(ended):
            assert ended.wait() == 0, ended.text
        job = started(disk, tmp_path, *_KEEP, "--resume", "never")
        with no_orphans(job):
            job.wait_for_event("saved")
            with filling(disk / "other", free_bytes(disk) - round(1.6 * save_bytes), within_s=1):
                wait_with_a_good_one(job)
        assert job.wait() == 0, job.text
        assert read_events(second, "save_failed") == [], job.text
        assert read_events(second, "thinned"), job.text
        assert committed_steps(first) == [2, 4]
        assert (foreign / "model.safetensors").exists() or list(second.glob("set-aside-*")), "it is not deleted"


@pytest.mark.long
def test_without_a_policy_nothing_is_deleted(save_bytes: int, tmp_path: Path) -> None:
    """The warning says so, the save fails, training continues, and the older checkpoints stay."""
    with small_disk(tmp_path / "disk", round(5.2 * save_bytes)) as disk:
        job = started(disk, tmp_path)
        with no_orphans(job):
            warned = job.wait_for_event("space_low")
            job.wait()
        assert warned["num_deletable"] == 0
        assert "no checkpoint can be deleted for a save now" in job.text
        assert "could not be saved" in job.text
        assert f"training finished at step {_LAST}" in job.text
        assert {2, 4} <= set(committed_steps(disk / "run"))
        assert all(verify(disk / "run" / checkpoint_name(step)).is_valid for step in committed_steps(disk / "run"))
