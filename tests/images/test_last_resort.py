"""Trainings that cannot be saved within the grace period: frozen instead, restored later, and equal to others."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from safepoint.foundation.events.stream import read_events
from safepoint.jobs.model.states import JobState
from tests.images.places import assert_equal, marks
from tests.support.commands import safepoint
from tests.support.jobs_local import LOOP, Place
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.timeout(300)
LATE = {"freeze_as_last_resort": True, "grace_s": 8.0}


def release(output: Path) -> None:
    """Let the step end in which a rank waits."""
    (output / "go").touch()


SHAPES = [
    pytest.param({"ranks_per_node": 2}, id="one launcher with two ranks"),
    pytest.param({"num_nodes": 2}, id="two launchers as two nodes"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_job_that_cannot_save_is_frozen(place: Place, reference: Place, shape: dict[str, int]) -> None:
    """A rank does not end its step. After `thaw`, it does. Then the job is saved, starts again, and loses nothing."""
    place.jobs.submit(place.training("late", "--step-ms", "0", "--wait-at", "5", **shape, settings=LATE))
    place.wait_for_mark("late", 5)
    outcome = safepoint("suspend", "late", "--yes")
    assert outcome.code == 0, outcome.stderr + place.story("late")
    job = place.jobs.job("late")
    assert job.state is JobState.SUSPENDED
    assert job.image is not None
    assert f"its process image is {job.image}" in outcome.stdout
    assert safepoint("thaw", "late").code == 0, place.story("late")
    release(place.output("late"))
    assert place.complete("late").attempt == 2
    for rank in range(2):
        assert marks(place, "late", rank) == [f"train {step}" for step in range(18)]
    assert_equal(place.output("late"), reference.output("pair"), 2)


class Run:
    """`safepoint run --freeze-as-last-resort` in the background, with files for its output.

    Args:
        root: an empty folder.
        program: the script, and its arguments.
    """

    def __init__(self, root: Path, *program: str) -> None:
        self.output = root / "out"
        self._log = root / "run.log"
        options = ["--freeze-as-last-resort", "--grace", "8", "--output-dir", str(self.output), *program]
        self._command = [sys.executable, "-m", "safepoint.cli.main", "run", *options]
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self.process

    def wait_for(self, text: str, path: Path) -> None:
        """Wait until there is a line in a file, or fail if the run ends before."""
        while not path.exists() or text not in path.read_text().split("\n"):
            assert self.process.poll() is None, self.printed
            time.sleep(0.05)

    def ends(self) -> int:
        return self.process.wait(timeout=150 * PATIENCE)

    @property
    def printed(self) -> str:
        return self._log.read_text()


def test_a_run_that_cannot_save_is_frozen_and_goes_on(tmp_path: Path, place: Place, reference: Place) -> None:
    """Frozen at SIGTERM; the same command goes on, and saves as soon as it can; the same command ends it."""
    run = Run(tmp_path, str(LOOP), "--out", str(tmp_path / "out"), "--step-ms", "0", "--wait-at", "5")
    run.wait_for("train 5", run.output / "marks-0")
    run.process.terminate()
    assert run.ends() == 75, run.printed
    assert f"A process image of the ranks was made: {run.output}/images/image-1" in run.printed
    names = [event["event"] for event in read_events(run.output / ".safepoint" / "events.jsonl")]
    assert names[-1] == "frozen", names
    assert not list(run.output.glob("checkpoint-*"))
    release(run.output)
    run.start()
    assert run.ends() == 75, run.printed
    assert list(run.output.glob("checkpoint-*"))
    run.start()
    assert run.ends() == 0, run.printed
    assert (run.output / "marks-0").read_text().splitlines() == [f"train {step}" for step in range(18)]
    assert_equal(run.output, reference.output("alone"), 1)


COUNT = """
import os, sys, time
folder = sys.argv[1]
total = 0
for number in range(200):
    total += number
    while number == 100 and not os.path.exists(folder + "/go"):
        time.sleep(0.05)
    print("number", number, flush=True)
print("total", total, flush=True)
"""


def test_a_program_that_saves_nothing_goes_on(tmp_path: Path, place: Place) -> None:
    """Safepoint knows nothing of its state, so without an image it would begin once more."""
    script = tmp_path / "count.py"
    script.write_text(COUNT)
    run = Run(tmp_path, str(script), str(tmp_path / "out"))
    run.wait_for("number 99", tmp_path / "run.log")
    run.process.terminate()
    assert run.ends() == 75, run.printed
    release(run.output)
    run.start()
    assert run.ends() == 0, run.printed
    numbers = [line for line in run.printed.splitlines() if line.startswith(("number", "total"))]
    assert numbers == [*(f"number {number}" for number in range(200)), f"total {sum(range(200))}"]


def test_output_to_a_pipe_goes_on_in_another_pipe(tmp_path: Path, place: Place) -> None:
    """As in a pod, where the output is a pipe that ends with the pod."""
    script = tmp_path / "count.py"
    script.write_text(COUNT)
    options = ["--freeze-as-last-resort", "--grace", "8", "--output-dir", str(tmp_path / "out")]
    command = [sys.executable, "-m", "safepoint.cli.main", "run", *options, str(script), str(tmp_path / "out")]
    printed: list[str] = []
    for code in (75, 0):
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            if code:
                printed += iter(process.stdout.readline, "number 99\n")
                process.terminate()
            printed += process.stdout
        assert process.returncode == code, printed
        release(tmp_path / "out")
    numbers = [line.strip() for line in printed if line.startswith(("number", "total"))]
    assert numbers == [f"number {number}" for number in range(200) if number != 99] + [f"total {sum(range(200))}"]
