"""Jobs of this machine: frozen in the middle of a step, restored, and equal to a job that was never frozen."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.foundation.processes import number_inside, processes_of
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.states import JobState
from safepoint.training.outcome.launcher_folder import launcher_folder, running_launchers
from tests.images.places import assert_equal, marks, states
from tests.images.test_one_tree import occupied
from tests.support.commands import safepoint
from tests.support.jobs_local import Place

pytestmark = pytest.mark.timeout(300)


SHAPES = [
    pytest.param({"ranks_per_node": 2}, id="one launcher with two ranks"),
    pytest.param({"num_nodes": 2}, id="two launchers as two nodes"),
    pytest.param({"ranks_per_node": 2, "settings": {"preload": True}}, id="ranks copied from a template"),
]


@contextlib.contextmanager
def other_launchers() -> Iterator[None]:
    """Launchers that start in the same moments. Each of them removes the folders of launchers that have ended."""
    is_over = threading.Event()

    def start() -> None:
        while not is_over.is_set():
            with launcher_folder():
                running_launchers()

    thread = threading.Thread(target=start)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize(
    ("shape", "is_number_taken"),
    [
        *(pytest.param(*shape.values, False, id=shape.id) for shape in SHAPES),
        pytest.param(*SHAPES[0].values, True, id="while others have their numbers"),
    ],
)
def test_a_job_goes_on_in_the_middle_of_a_step(
    place: Place, reference: Place, shape: dict[str, Any], is_number_taken: bool
) -> None:
    """DDP over gloo, frozen twice. Each step begins once: nothing is repeated. The results are equal, bit for bit."""
    place.jobs.submit(place.training("frozen", "--step-ms", "400", **shape))
    for step in (3, 8):
        place.wait_for_mark("frozen", step)
        folders = [folder for folder, pid in running_launchers() if pid in place.launchers("frozen")]
        root = number_inside(min(place.launchers("frozen")))
        outcome = safepoint("freeze", "frozen", "--json")
        assert outcome.code == 0, outcome.stderr + place.story("frozen")
        job = place.jobs.job("frozen")
        assert job.state is JobState.SUSPENDED
        assert job.image == outcome.document["path"]
        assert processes_of(job_folder("frozen")) == []
        assert len(marks(place, "frozen")) < 18
        assert len(folders) == shape.get("num_nodes", 1)
        for folder in folders:  # as another launcher would do
            shutil.rmtree(folder, ignore_errors=True)
        with other_launchers(), occupied(root) if is_number_taken else contextlib.nullcontext():
            outcome = safepoint("thaw", "frozen", "--json")
        assert outcome.code == 0, outcome.stderr + place.story("frozen")
        assert outcome.document["has_own_namespace"] or not is_number_taken
        assert len(outcome.document["trees"]) == shape.get("num_nodes", 1)
    assert place.complete("frozen").attempt == 1
    for rank in range(2):
        assert marks(place, "frozen", rank) == [f"train {step}" for step in range(18)]
    assert_equal(place.output("frozen"), reference.output("pair"), 2)
    known = states("frozen")
    assert known.index("suspended") < known.index("resuming") < known.index("complete")


def test_a_job_that_runs_on_can_go_back(place: Place, reference: Place) -> None:
    """It is not changed. After it was suspended, it goes back to its image, and saves its checkpoints once more."""
    place.jobs.submit(place.training("job", "--step-ms", "1500", "--save-steps", "2"))
    place.wait_for_mark("job", 2)
    for number in (1, 2):
        outcome = safepoint("freeze", "job", "--leave-running", "--json")
        assert outcome.code == 0, outcome.stderr + place.story("job")
        assert outcome.document["name"] == f"image-{number}"
    job = place.jobs.job("job")
    assert (job.state, job.attempt) == (JobState.RUNNING, 1)
    frozen = len(marks(place, "job"))
    place.wait_for_saved("job", frozen + 1)
    assert safepoint("suspend", "job", "--yes").code == 0, place.story("job")
    assert safepoint("thaw", "job").code == 0, place.story("job")
    assert place.complete("job").attempt == 1
    assert_equal(place.output("job"), reference.output("alone"), 1)
    assert safepoint("thaw", "job").code == 11  # it is complete


def test_a_frozen_job_resumes_from_its_checkpoint(place: Place, reference: Place) -> None:
    """A person asks for the checkpoint; the image does not count any more."""
    place.jobs.submit(place.training("job", "--save-steps", "2"))
    place.wait_for_saved("job")
    assert safepoint("freeze", "job").code == 0, place.story("job")
    assert safepoint("resume", "job", "--from-checkpoint").code == 0
    assert place.complete("job").attempt == 2
    assert_equal(place.output("job"), reference.output("alone"), 1)
    assert place.jobs.job("job").image is None


def test_a_frozen_job_resumes_from_what_is_newer(place: Place, reference: Place) -> None:
    """First from the image, then from the checkpoint, then from the checkpoint because the image is damaged."""
    place.jobs.submit(place.training("job", "--step-ms", "1500", "--save-steps", "2"))
    place.wait_for_saved("job")
    outcome = safepoint("freeze", "job")
    assert outcome.code == 0, outcome.stderr + place.story("job")
    outcome = safepoint("resume", "job")
    assert outcome.code == 0, outcome.stderr
    assert "image-1" in outcome.stdout
    assert "the newest checkpoint (step" in outcome.stdout
    place.jobs.wait("job", [JobState.RUNNING], timeout_s=120)
    assert place.jobs.job("job").attempt == 1, place.story("job")
    assert safepoint("suspend", "job", "--yes").code == 0, place.story("job")
    assert place.jobs.job("job").was_saved, place.story("job")
    outcome = safepoint("resume", "job")
    assert "is newer than" in outcome.stdout, outcome.stderr
    place.jobs.wait("job", [JobState.RUNNING], timeout_s=120)
    assert place.jobs.job("job").attempt == 2, place.story("job")
    outcome = safepoint("freeze", "job", "--json")
    assert outcome.code == 0, outcome.stderr + place.story("job")
    next(Path(outcome.document["path"]).rglob("pages-*.regions")).unlink()
    outcome = safepoint("resume", "job")
    assert "the process image cannot be used" in outcome.stdout, outcome.stderr
    assert place.complete("job").attempt == 3
    assert_equal(place.output("job"), reference.output("alone"), 1)


def test_an_image_that_cannot_be_restored_falls_back_to_the_checkpoint(place: Place, reference: Place) -> None:
    """A page is damaged, which is found only when it is read. The job says so, and continues."""
    place.jobs.submit(place.training("job", "--save-steps", "2"))
    place.wait_for_saved("job")
    outcome = safepoint("freeze", "job", "--json")
    assert outcome.code == 0, outcome.stderr + place.story("job")
    path = max(Path(outcome.document["path"]).rglob("pages-*.regions"), key=lambda one: one.stat().st_size)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    outcome = safepoint("resume", "job")
    assert "image-1" in outcome.stdout, outcome.stderr
    assert place.complete("job").attempt == 2, place.story("job")
    [first, _] = place.jobs.attempts("job")
    assert "could not be restored" in first.outcome
    assert_equal(place.output("job"), reference.output("alone"), 1)


def test_a_job_without_progress_continues_from_its_checkpoint(place: Place, reference: Place) -> None:
    """A rank that is stopped as soon as it was restored makes no progress. The supervisor says so, and ends it."""
    place.jobs.submit(place.training("stuck", "--save-steps", "2"))
    place.wait_for_saved("stuck")
    assert safepoint("freeze", "stuck").code == 0, place.story("stuck")
    assert safepoint("thaw", "stuck").code == 0, place.story("stuck")
    for pid in place.processes("stuck", "rank"):
        os.kill(pid, signal.SIGSTOP)
    assert place.complete("stuck", timeout_s=200).attempt == 2
    assert_equal(place.output("stuck"), reference.output("alone"), 1)
    [first, _] = place.jobs.attempts("stuck")
    assert "no progress" in first.outcome


@pytest.mark.parametrize("victim", ["coordinator", "criu", "launcher"])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_after_a_kill_the_job_runs_on(place: Place, reference: Place, shape: dict[str, Any], victim: str) -> None:
    """Killed while CRIU runs. Nothing stays stopped, and the result is the same."""
    place.jobs.submit(place.training("job", "--step-ms", "1000", "--save-steps", "2", **shape))
    place.wait_for_saved("job")
    images = job_folder("job") / "images"
    command = [sys.executable, "-m", "safepoint.cli.main", "freeze", "job", "--leave-running"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not list((images / ".safepoint" / "images").glob("criu-dump-*.log")):
            assert process.poll() is None, place.story("job")
            time.sleep(0.001)
        if victim == "coordinator":
            process.kill()
        elif victim == "launcher":
            os.kill(place.launchers("job")[-1], signal.SIGKILL)
        else:
            for pid in _criu_below(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    job = place.complete("job")
    # A process in which CRIU is killed may crash; then the job starts again.
    assert job.attempt <= (1 if victim == "coordinator" else 2), place.story("job")
    assert_equal(place.output("job"), reference.output("pair"), 2)


def _criu_below(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid and b"criu" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found
