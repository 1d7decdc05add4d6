"""A loop of Accelerate with one line changed: interrupted in every way, its result is that of the unchanged loop."""

import signal
import sys
from pathlib import Path

import pytest

from tests.support.equality import finals, same
from tests.support.jobs import Job, committed_steps, environment, no_orphans, read_events, safepoint

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

_PROGRAM = Path(__file__).parent.parent / "programs" / "accelerated.py"


def start(output: Path, *arguments: str, ranks: int = 1, options: tuple[str, ...] = ()) -> Job:
    given = ("--nproc-per-node", str(ranks), "--output-dir", str(output), *options)
    return safepoint(output, *given, program=[str(_PROGRAM), "--out", str(output), *arguments])


def train_plain(output: Path, *arguments: str, ranks: int = 1) -> None:
    """The unchanged loop, without Safepoint."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(_PROGRAM), "--out", str(output), "--plain", *arguments]
    job = Job(command, output, log=output.parent / f"{output.name}.log", env=environment())
    assert job.wait() == 0, job.text


def evaluations(output: Path) -> list[str]:
    """Each epoch's own, once: an epoch that ended with a save is evaluated after it, too."""
    return list(dict.fromkeys((output / "evaluations.jsonl").read_text().splitlines()))


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        pytest.param(1, (), marks=pytest.mark.long),
        (1, ("--accumulate", "3")),
        (2, ()),
        pytest.param(2, ("--accumulate", "2"), marks=pytest.mark.long),
    ],
)
def test_interrupted_is_uninterrupted(ranks: int, arguments: tuple[str, ...], tmp_path: Path) -> None:
    """By a signal within an epoch, then by the death of everything."""
    reference, output = tmp_path / "reference", tmp_path / "run"
    train_plain(reference, *arguments, ranks=ranks)
    job = start(output, "--step-ms", "80", *arguments, ranks=ranks)
    with no_orphans(job):
        job.wait_for_mark("train 0", 6)
        job.signal()
        assert job.wait() == 75, job.text
    (interrupted,) = job.events("interrupted")
    assert committed_steps(output) == [interrupted["step"]]
    job = start(output, "--step-ms", "80", *arguments, ranks=ranks, options=("--save-steps", "2"))
    with no_orphans(job):
        job.wait_for_mark("train 1", 4)
        job.signal(signal.SIGKILL)
        job.kill_everything()
    job = start(output, *arguments, ranks=ranks)
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert read_events(output, "resumed")
    assert same(finals(output, ranks), finals(reference, ranks))
    assert evaluations(output) == evaluations(reference)
    assert (output / "final").is_dir() or committed_steps(output)


@pytest.mark.parametrize("where", ["batches", "epochs"])
def test_a_loop_that_breaks(where: str, tmp_path: Path) -> None:
    """Out of its batches, it goes on with the next epoch; out of its epochs, its last step is saved."""
    reference, output = tmp_path / "reference", tmp_path / "run"
    train_plain(reference, "--stop", where)
    job = start(output, "--stop", where)
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert same(finals(output, 1), finals(reference, 1))
    assert committed_steps(output) == [{"batches": 22 + 4 + 22, "epochs": 22 + 4}[where]]


def test_a_loop_that_fails(tmp_path: Path) -> None:
    """It ends as it would by itself, and what was saved before stays."""
    output = tmp_path / "run"
    job = start(output, "--fail", options=("--save-steps", "10", "--max-restarts", "0"))
    with no_orphans(job):
        assert job.wait() == 1, job.text
    assert "the script fails on purpose" in job.text
    assert committed_steps(output)[:2] == [10, 20]


def test_a_loop_on_another_loader_is_stopped_at_its_first_step(tmp_path: Path) -> None:
    """A resume would skip nothing of what was trained on."""
    job = start(tmp_path / "run", "--wrong-loader")
    with no_orphans(job):
        assert job.wait() == 2, job.text
    assert "data=loader" in job.text


def test_gradients_accumulated_by_the_index_are_warned_of(tmp_path: Path) -> None:
    job = start(tmp_path / "run", "--accumulate", "2", "--by-index", "--epochs", "1")
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert "accumulates gradients over 2 batches by itself" in job.text


def test_under_accelerates_own_launcher(tmp_path: Path) -> None:
    output = tmp_path / "run"
    program = ["accelerate", "launch", "--cpu", str(_PROGRAM), "--out", str(output), "--step-ms", "80"]
    given = ("--nproc-per-node", "2", "--output-dir", str(output))
    job = safepoint(output, *given, program=program)
    with no_orphans(job):
        job.wait_for_mark("train 0", 4)
        job.signal()
        assert job.wait() == 75, job.text
    assert committed_steps(output)
