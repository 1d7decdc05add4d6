"""Another number of ranks: the same samples per step, the same position in the data, or a refusal."""

import signal
from pathlib import Path

import pytest

from tests.support.equality import logged, samples
from tests.support.jobs import no_orphans, read_events, safepoint, tiny

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

_TWO = ("--nproc-per-node", "2")
_OPTIONS = ("--samples", "72", "--epochs", "2", "--logging-steps", "1", "--dropout", "0", "--tell-samples")
"""Masks of dropout would differ with the number of ranks."""


def interrupted(output: Path, ranks: int, *options: str) -> int:
    job = safepoint(output, "--nproc-per-node", str(ranks), program=tiny(output, *options, "--step-ms", "30"))
    with no_orphans(job):
        job.wait_for_step(5)
        job.signal(signal.SIGTERM)
        assert job.wait() == 75, job.text
    return read_events(output, "saved")[-1]["step"]


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.long)])
def test_global_batch_is_kept_by_accumulation(before: int, after: int, tmp_path: Path) -> None:
    """Every step after the change sees the same samples: the losses follow the reference."""
    accumulation = {2: "2", 1: "4"}
    reference = tmp_path / "reference"
    job = safepoint(
        reference,
        "--nproc-per-node",
        str(before),
        program=tiny(reference, *_OPTIONS, "--grad-accum", accumulation[before]),
    )
    with no_orphans(job):
        assert job.wait() == 0, job.text
    output = tmp_path / "run"
    step = interrupted(output, before, *_OPTIONS, "--grad-accum", accumulation[before])
    job = safepoint(
        output,
        *("--nproc-per-node", str(after)),
        program=tiny(output, *_OPTIONS, "--grad-accum", accumulation[before]),
    )
    with no_orphans(job):
        assert job.wait() == 0, job.text
    kept = read_events(output, "batch_kept")[0]
    assert kept["accumulation"] == int(accumulation[after])
    assert read_events(output, "resumed")[0]["step"] == step
    assert_same_steps(output, reference)


@pytest.mark.long
def test_what_was_adapted_stays_so_on_the_same_ranks(tmp_path: Path) -> None:
    """A second start with the script's unchanged settings keeps the adapted accumulation."""
    options = (*_OPTIONS, "--grad-accum", "2")
    reference, output = tmp_path / "reference", tmp_path / "run"
    job = safepoint(reference, *_TWO, program=tiny(reference, *options))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    step = interrupted(output, 2, *options)
    job = safepoint(output, program=tiny(output, *options, "--step-ms", "30"))
    with no_orphans(job):
        job.wait_for_step(step + 2)
        job.signal(signal.SIGTERM)
        assert job.wait() == 75, job.text
    job = safepoint(output, program=tiny(output, *options))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert len(read_events(output, "batch_kept")) == 1
    assert_same_steps(output, reference)


def assert_same_steps(output: Path, reference: Path) -> None:
    """Each step has seen its samples; learning rates are equal, and losses equal up to rounding."""
    assert samples(output) == samples(reference)
    ours, theirs = logged(output), logged(reference)
    assert [entry.get("step") for entry in ours] == [entry.get("step") for entry in theirs]
    assert [entry.get("learning_rate") for entry in ours] == [entry.get("learning_rate") for entry in theirs]
    for mine, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4), (mine, other)


@pytest.mark.long
def test_a_step_of_other_micro_batches_sees_its_samples(tmp_path: Path) -> None:
    """Also with a loader whose own state counts batches and no longer fits."""
    options = (*_OPTIONS, "--samples", "160", "--epochs", "1", "--data", "stateful")
    before, after = (("--batch-size", str(batch), "--grad-accum", str(8 // batch)) for batch in (4, 2))
    reference, output = tmp_path / "reference", tmp_path / "run"
    job = safepoint(reference, *_TWO, program=tiny(reference, *options, *before))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    interrupted(output, 2, *options, *before)
    job = safepoint(output, *_TWO, program=tiny(output, *options, *after))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert_same_steps(output, reference)


@pytest.mark.long
def test_a_batch_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    """Exit code 11 names the option that allows it; with the option, this and later starts run."""
    output = tmp_path / "run"
    changed = (*_OPTIONS, "--grad-accum", "1", "--batch-size", "3")
    step = interrupted(output, 2, *_OPTIONS, "--grad-accum", "1")
    job = safepoint(output, *_TWO, program=tiny(output, *changed))
    with no_orphans(job):
        assert job.wait() == 11, job.text
    assert "--allow-batch-change" in job.text
    job = safepoint(output, *_TWO, "--allow-batch-change", program=tiny(output, *changed, "--step-ms", "30"))
    with no_orphans(job):
        job.wait_for_step(step + 3)
        job.signal(signal.SIGTERM)
        assert job.wait() == 75, job.text
    job = safepoint(output, *_TWO, program=tiny(output, *changed))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert_each_sample_once_per_epoch(output, step, before=4, after=6)


def assert_each_sample_once_per_epoch(output: Path, changed_at: int, *, before: int, after: int) -> None:
    """Except samples that the first step of another size sees again, because of where it begins."""
    seen = samples(output)
    again = changed_at * before % after
    num_steps = (72 - changed_at * before + again) // after
    first = [seen[step] for step in range(changed_at + num_steps)]
    assert sorted({sample for step in first for sample in step}) == list(range(72))
    assert sum(map(len, first)) == 72 + again
    second = [seen[step] for step in range(changed_at + num_steps, max(seen) + 1)]
    shown = [sample for step in second for sample in step]
    assert len(shown) == len(set(shown)) > 30
    assert second[-len(first[changed_at:]) :] != first[changed_at:], "the first epoch's order once more"
