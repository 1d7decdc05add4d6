"""Where the Trainer resumes in data without an index, and with a loader that keeps its own state."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.equality import assert_same_run
from tests.support.jobs import no_orphans, safepoint, tiny

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

_BATCH, _ACCUMULATION, _STEPS = 2, 2, 30
_PER_STEP = _BATCH * _ACCUMULATION
_STEPS_PER_PASS = 64 // _PER_STEP
_AHEAD = 2 * 2 * _BATCH + _BATCH
"""Samples that two workers read ahead, two batches each, and Accelerate another one."""
KINDS = {
    "stream": ("--data", "stream"),
    "stateful": ("--data", "stateful"),
    "stateful with workers": ("--data", "stateful", "--workers", "2"),
}


@pytest.mark.parametrize(
    ("kind", "stop"),
    [
        ("stateful", 6),
        *(pytest.param(kind, 6, marks=pytest.mark.long) for kind in ("stream", "stateful with workers")),
        *(pytest.param(kind, 22, marks=pytest.mark.long) for kind in KINDS),
    ],
)
def test_the_run_goes_on_where_it_was(kind: str, stop: int, tmp_path: Path) -> None:
    """The resumed run equals the uninterrupted one; a loader with a state reads nothing again."""
    shape = (*KINDS[kind], "--max-steps", str(_STEPS), "--samples", "64")
    reference, output = tmp_path / "reference", tmp_path / "run"
    job = safepoint(reference, program=tiny(reference, *shape))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    job = safepoint(output, program=tiny(output, *shape, "--step-ms", "50"))
    with no_orphans(job):
        job.wait_for_step(stop)
        os.kill(job.rank_pids()[0], signal.SIGTERM)
        assert job.wait() == 75, job.text
    step = job.events("saved")[-1]["step"]
    assert (step > _STEPS_PER_PASS) == (stop > _STEPS_PER_PASS)
    before = (output / "reads").stat().st_size
    job = safepoint(output, program=tiny(output, *shape))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert_same_run(output, reference)
    read = (output / "reads").stat().st_size - before
    left = (_STEPS - step) * _PER_STEP
    in_epoch = step % _STEPS_PER_PASS * _PER_STEP
    if kind == "stream":
        assert read >= left + in_epoch
    elif kind == "stateful":
        assert left <= read <= left + 2 * _BATCH  # Accelerate reads one batch ahead
    else:
        # The pass that Accelerate begins when it makes the loader is thrown away, and what is ahead at the end too.
        assert left <= read < left + 2 * _AHEAD < left + in_epoch


@pytest.mark.long
@pytest.mark.parametrize("data", ["stream", "stateful-stream"])
def test_a_pass_that_has_ended_is_not_begun_again(data: str, tmp_path: Path) -> None:
    """The checkpoint is of the last step of a pass, before the loop noticed that the pass had ended."""
    shape = ("--data", data, "--max-steps", str(_STEPS), "--samples", "64")
    saves = ("--save-strategy", "steps", "--save-steps", str(_STEPS_PER_PASS))
    reference, output = tmp_path / "reference", tmp_path / "run"
    job = safepoint(reference, *saves, program=tiny(reference, *shape))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    name = f"checkpoint-{_STEPS_PER_PASS}"
    shutil.copytree(reference / name, output / name)
    job = safepoint(output, *saves, program=tiny(output, *shape))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert_same_run(output, reference)


@pytest.mark.long
def test_a_step_that_is_given_up_is_trained_on_later(tmp_path: Path) -> None:
    """The batches of the unfinished step were read; the resumed run reads them again."""
    shape = ("--data", "stateful", "--samples", "128", "--grad-accum", "16", "--epochs", "1", "--logging-steps", "1")
    reference, output = tmp_path / "reference", tmp_path / "run"
    job = safepoint(reference, program=tiny(reference, *shape))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    job = safepoint(output, "--grace", "5", program=tiny(output, *shape, "--step-ms", "500"))
    with no_orphans(job):
        job.wait_for_mark("train 1", count=2)
        job.signal()
        assert job.wait() == 75, job.text
    assert job.events("step_given_up")[0]["step"] == 2
    assert job.events("saved")[-1]["step"] == 1
    job = safepoint(output, program=tiny(output, *shape))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert_same_run(output, reference)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((), ()),
        *(
            pytest.param(shape, options, marks=pytest.mark.long)
            for shape in [(), ("--workers", "2"), ("--data", "stream"), ("--data", "stateful")]
            for options in [(), ("--nproc-per-node", "2")]
            if shape or options
        ),
        pytest.param(
            ("--workers", "2", "--settings", '{"dataloader_persistent_workers": true}'), (), marks=pytest.mark.long
        ),
        pytest.param(
            ("--settings", '{"accelerator_config": {"dispatch_batches": true}}'),
            ("--nproc-per-node", "2"),
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.parametrize("stop", [3, pytest.param(11, marks=pytest.mark.long)])
def test_a_collator_that_draws_random_numbers(
    shape: tuple[str, ...], options: tuple[str, ...], stop: int, tmp_path: Path
) -> None:
    """Accelerate has fetched a batch ahead, whose numbers were drawn, and workers have states of their own."""
    more = ("--masks", "--samples", "60", "--max-steps", "20", "--logging-steps", "1", *shape)
    reference, output = tmp_path / "reference", tmp_path / "run"
    job = safepoint(reference, *options, program=tiny(reference, *more))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    job = safepoint(output, *options, program=tiny(output, *more, "--step-ms", "50"))
    with no_orphans(job):
        job.wait_for_step(stop)
        os.kill(job.rank_pids()[0], signal.SIGTERM)
        assert job.wait() == 75, job.text
    job = safepoint(output, *options, program=tiny(output, *more))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert_same_run(output, reference)
