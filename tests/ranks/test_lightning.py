"""Lightning's Trainer with the callback: after a stop or a kill at any point, the result is bit-equal."""

import shutil
import signal
import sys
from pathlib import Path

import pytest

from safepoint.progress.record import State, read_progress
from tests.support.equality import finals, same
from tests.support.jobs import Job, committed_steps, environment, no_orphans, read_events, safepoint

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

_PROGRAM = Path(__file__).parent.parent / "programs" / "lightning_loop.py"
_STEPS = 18
_IN_EPOCH = 6
_VARIANTS = {
    "validation within epochs": ("--validate", "0.28"),
    "a plateau scheduler": ("--plateau", "--validate", "0.28"),
    "workers": ("--workers", "2"),
    "a stream": ("--stream",),
    "two loaders": ("--two-loaders",),
}


def _start(output: Path, *arguments: str, ranks: int = 1) -> Job:
    program = [str(_PROGRAM), "--out", str(output), *arguments]
    return safepoint(output, "--nproc-per-node", str(ranks), program=program)


def _finish(job: Job) -> None:
    with no_orphans(job):
        assert job.wait() == 0, job.text


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_stopped_and_killed_it_ends_with_the_same_bits(ranks: int, tmp_path: Path) -> None:
    """A signal in the first epoch, SIGKILL of all in the second; the same command each time."""
    _finish(_start(tmp_path / "reference", "--step-ms", "0", ranks=ranks))
    output = tmp_path / "run"
    stopped = _start(output, "--save-steps", "3", ranks=ranks)
    with no_orphans(stopped):
        stopped.wait_for_mark("train 4")
        stopped.signal(signal.SIGTERM)
        assert stopped.wait() == 75, stopped.text
    [stop] = read_events(output, "stop_requested")
    assert committed_steps(output)[-1] == stop["step"]
    progress = read_progress(output / ".safepoint" / "progress.json")
    assert progress is not None
    assert (progress.state, progress.step, progress.max_steps) == (State.INTERRUPTED, stop["step"], _STEPS)
    assert progress.loss is not None
    killed = _start(output, "--save-steps", "3", ranks=ranks)
    with no_orphans(killed):
        killed.wait_for_mark("train 10")
        killed.wait_for_event("saved", trigger="periodic", step=9)
        killed.kill_everything()
    _finish(_start(output, ranks=ranks))
    assert read_events(output, "resumed")[0]["step"] == stop["step"]
    assert read_events(output, "finished")[0]["step"] == _STEPS
    progress = read_progress(output / ".safepoint" / "progress.json")
    assert progress is not None
    assert (progress.percent, progress.max_steps, list(progress.eval_metrics)) == (100.0, _STEPS, ["val_loss"])
    for mine, expected in zip(finals(output, ranks), finals(tmp_path / "reference", ranks), strict=True):
        assert same(mine, expected)


@pytest.mark.long
@pytest.mark.parametrize("variant", _VARIANTS)
def test_every_boundary_is_one_to_go_on_from(variant: str, tmp_path: Path) -> None:
    """In mid-epoch, before a validation and between two epochs: nothing is repeated or left out."""
    shape = _VARIANTS[variant]
    reference = tmp_path / "reference"
    _finish(_start(reference, "--save-steps", "1", "--step-ms", "60", *shape))
    for step in (2, 3, _IN_EPOCH, _IN_EPOCH + 1):
        output = tmp_path / str(step)
        shutil.copytree(reference / f"checkpoint-{step}", output / f"checkpoint-{step}")
        job = _start(output, "--step-ms", "0", *shape)
        _finish(job)
        assert job.events("resumed")[0]["step"] == step
        assert same(finals(output, 1), finals(reference, 1)), f"after step {step}"


@pytest.mark.parametrize("shape", [("--no-norm",), pytest.param((), marks=pytest.mark.long)], ids=["plain", "norm"])
def test_averages_continue_within_an_epoch(shape: tuple[str, ...], tmp_path: Path) -> None:
    """Lightning makes the scheduler of the averages when an epoch begins, so not after a resume within an epoch.

    It takes over the averages when a training ends, so not in a start that finds no step left to train. With
    BatchNorm, Lightning adds an epoch.
    """
    shape = ("--average", "--plateau", "--epochs", "4", *shape)
    reference, output, last = tmp_path / "reference", tmp_path / "run", 4 * _IN_EPOCH
    _finish(_start(reference, "--step-ms", "0", *shape))
    ends = [2 * _IN_EPOCH + 2, 2 * _IN_EPOCH + 3, 2 * _IN_EPOCH + 5]
    for end in ends:
        _finish(_start(output, "--step-ms", "0", "--max-steps", str(end), *shape))
    stopped = _start(output, "--step-ms", "600", *shape)
    with no_orphans(stopped):
        stopped.wait_for_mark(f"train {last - 1}")
        stopped.signal(signal.SIGTERM)
        assert stopped.wait() == 75, stopped.text
    for _ in range(2):
        _finish(_start(output, "--step-ms", "0", *shape))
        assert same(finals(output, 1), finals(reference, 1))
    assert [one["step"] for one in read_events(output, "resumed")][:4] == [*ends, last]


@pytest.mark.long
def test_a_finished_run_does_nothing(tmp_path: Path) -> None:
    """The same command again loads the end and exits."""
    output = tmp_path / "run"
    _finish(_start(output, "--step-ms", "0"))
    marks = (output / "marks-0").read_text()
    _finish(_start(output, "--step-ms", "0"))
    assert (output / "marks-0").read_text() == marks
    assert committed_steps(output) == [_STEPS]
    assert len(read_events(output, "finished")) == 2


def test_a_signal_during_the_trial_validation(tmp_path: Path) -> None:
    """Lightning alone would end there without training, with exit code 0."""
    output = tmp_path / "run"
    job = _start(output, "--step-ms", "500")
    with no_orphans(job):
        job.wait_for_mark("validate")
        job.signal(signal.SIGTERM)
        assert job.wait() == 75, job.text
    assert committed_steps(output) == [1]


@pytest.mark.long
def test_early_stopping_stays_stopped(tmp_path: Path) -> None:
    """The same command trains no further step; the script's own ModelCheckpoint writes too."""
    output = tmp_path / "run"
    _finish(_start(output, "--step-ms", "0", "--stop-early"))
    marks = (output / "marks-0").read_text()
    assert committed_steps(output) == [2 * _IN_EPOCH]
    assert list((output / "best").iterdir())
    _finish(_start(output, "--step-ms", "0", "--stop-early"))
    assert (output / "marks-0").read_text() == marks


@pytest.mark.long
def test_more_steps_than_before(tmp_path: Path) -> None:
    """A run that `max_steps` ended in mid-epoch continues there."""
    _finish(_start(tmp_path / "reference", "--step-ms", "0", "--plateau", "--max-steps", "9"))
    output = tmp_path / "run"
    _finish(_start(output, "--step-ms", "0", "--plateau", "--max-steps", "8"))
    _finish(_start(output, "--step-ms", "0", "--plateau", "--max-steps", "9"))
    assert same(finals(output, 1), finals(tmp_path / "reference", 1))


@pytest.mark.long
def test_a_second_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    """A second fit is refused: it would resume from the checkpoints of the first."""
    output = tmp_path / "run"
    job = _start(output, "--step-ms", "0", "--epochs", "1", "--fit-twice")
    with no_orphans(job):
        assert job.wait() == 2, job.text
    assert "a second training into" in job.text
    assert "AttributeError" not in job.text


@pytest.mark.long
def test_ranks_that_lightning_starts_are_refused(tmp_path: Path) -> None:
    """The launcher does not know such ranks; the message says how to start them."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import lightning.pytorch as pl, torch\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "from safepoint.lightning import SafepointCallback\n"
        "pl.Trainer(accelerator='cpu', devices=2, strategy='ddp', logger=False, max_steps=2,\n"
        "           callbacks=[SafepointCallback(output_dir=sys.argv[2])]).fit(BoringModel())\n"
    )
    output = tmp_path / "run"
    command = [sys.executable, str(script), str(Path(__file__).parents[2]), str(output)]
    job = Job(command, output, log=tmp_path / "log", env=environment())
    with no_orphans(job):
        assert job.wait() == 1, job.text
    assert "start all ranks with `safepoint run --nproc-per-node N SCRIPT`" in job.text


@pytest.mark.long
def test_more_ranks_than_lightning_has_devices_are_refused(tmp_path: Path) -> None:
    """Otherwise each rank would train alone, and none would find the other."""
    output = tmp_path / "run"
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import lightning.pytorch as pl\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "from safepoint.lightning import SafepointCallback\n"
        "pl.Trainer(accelerator='cpu', devices=1, logger=False, max_steps=2,\n"
        "           callbacks=[SafepointCallback(output_dir=sys.argv[1])]).fit(BoringModel())\n"
    )
    job = safepoint(output, "--nproc-per-node", "2", program=[str(script), str(output)])
    with no_orphans(job):
        assert job.wait() == 2, job.text
    assert "Lightning trains on 1 rank, but 2 were started" in job.text
