"""FSDP2 under the Trainer on another number of ranks: loaded weights equal saved ones, and training continues alike.

Every run here trains without dropout, whose masks would differ; the second starts with other weights than the first,
so that what is not loaded differs.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.equality import logged, same, samples
from tests.support.jobs import no_orphans, read_events, safepoint, tiny

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400), pytest.mark.long]

STEP = 2
"""In the middle of the first of two epochs of three steps."""
_MICRO_BATCHES = 12
"""Of two samples in a step, over all ranks."""


def run(output: Path, strategy: str, ranks: int, *arguments: str, accumulation: int) -> None:
    program = tiny(
        output,
        *("--strategy", strategy, "--end", "end", "--samples", "72", "--epochs", "2", "--logging-steps", "1"),
        *("--dropout", "0", "--grad-accum", str(accumulation), "--tell-samples", "--tell-state", str(STEP)),
        *arguments,
    )
    saves = ("--save-strategy", "steps", "--save-steps", str(STEP))
    job = safepoint(output, "--nproc-per-node", str(ranks), *saves, program=program)
    with no_orphans(job):
        assert job.wait(200) == 0, job.text


@pytest.mark.parametrize(
    ("strategy", "before", "after"), [("fsdp", 2, 3), ("fsdp", 3, 2), ("fsdp-full", 2, 1), ("fsdp-full", 1, 2)]
)
def test_everything_goes_on(strategy: str, before: int, after: int, tmp_path: Path) -> None:
    """Weights, moments, learning rates, and the samples of each step equal those of a run without a change."""
    reference, output = tmp_path / "reference", tmp_path / "run"
    accumulation = _MICRO_BATCHES // before
    run(reference, strategy, before, accumulation=accumulation)
    # As if it had been killed soon after its first checkpoint.
    output.mkdir()
    shutil.copytree(reference / f"checkpoint-{STEP}", output / f"checkpoint-{STEP}")
    run(output, strategy, after, "--model-seed", "2", accumulation=accumulation)
    assert read_events(output, "batch_kept")[0]["accumulation"] == _MICRO_BATCHES // after
    loaded, saved = load(output / "state-begin.pt"), load(reference / f"state-{STEP}.pt")
    assert same(loaded, saved)
    assert all(state["exp_avg"].any() for state in saved["optimizer"]["state"].values())
    assert samples(output) == {step: seen for step, seen in samples(reference).items() if step >= STEP}
    ours, theirs = logged(output, "end"), logged(reference, "end")
    assert [entry.get("learning_rate") for entry in ours] == [entry.get("learning_rate") for entry in theirs]
    for mine, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4), (mine, other)
    last, expected = load(output / "end" / "whole.pt"), load(reference / "end" / "whole.pt")
    assert last["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert torch.allclose(last["weights"][name], weight, atol=1e-4), name


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=False)
