"""Sessions on another number of ranks: the same weights and moments, no sample seen twice or left out."""

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.support.jobs import committed_steps, no_orphans, read_events, safepoint

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

SHARDS = Path(__file__).parent.parent / "programs" / "shards.py"
IN_TEST = {("fsdp", 1, 2)}
PAIRS = [
    pytest.param(*case, marks=[] if case in IN_TEST else [pytest.mark.long])
    for case in itertools.product(("ddp", "fsdp"), range(1, 5), range(1, 5))
]


def _program(output: Path, kind: str, *options: str) -> list[str]:
    return [str(SHARDS), "--out", str(output), "--kind", kind, *options]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one == other


def _check_begun_as_ended(output: Path, step: int) -> None:
    ended, begun = (torch.load(output / f"{name}-{step}.pt", weights_only=True) for name in ("ended", "begun"))
    assert _equal(begun, ended), "weights, moments and learning rate are what they were"


def _stop_in_the_first_epoch(output: Path, num_ranks: int, program: list[str]) -> int:
    """Send the signal to the last rank; returns the step that was saved."""
    job = safepoint(output, "--nproc-per-node", str(num_ranks), program=program)
    with no_orphans(job):
        job.wait_for_mark("train 4")
        os.kill(job.rank_pids()[-1], signal.SIGTERM)
        assert job.wait() == 75, job.text
    [stop] = read_events(output, "stop_requested")
    return stop["step"]


@pytest.mark.parametrize(("kind", "before", "after"), PAIRS)
def test_another_number_of_ranks(kind: str, before: int, after: int, tmp_path: Path) -> None:
    """Stopped in the first epoch, resumed on another number of ranks."""
    output = tmp_path / "run"
    step = _stop_in_the_first_epoch(output, before, _program(output, kind))
    assert committed_steps(output)[-1] == step
    again = safepoint(output, "--nproc-per-node", str(after), program=_program(output, kind))
    with no_orphans(again):
        assert again.wait(120) == 0, again.text
    _check_begun_as_ended(output, step)
    samples: dict[int, list[int]] = {}
    for path in output.glob("seen-*"):
        for line in path.read_text().splitlines():
            number, *found = map(int, line.split())
            samples.setdefault(number, []).extend(found)
    assert sorted(samples) == list(range(20))
    for epoch in (0, 1):
        seen = [sample for number in range(10 * epoch, 10 * epoch + 10) for sample in samples[number]]
        assert sorted(seen) == list(range(240))
    assert read_events(output, "finished")[0]["step"] == 20


@pytest.mark.long
def test_a_weight_that_was_never_stepped(tmp_path: Path) -> None:
    """It has no moments before and after; another sharded model is refused, with the difference."""
    output = tmp_path / "run"
    step = _stop_in_the_first_epoch(output, 1, _program(output, "fsdp", "--unused"))
    refused = safepoint(output, program=_program(output, "fsdp", "--unused", "--width", "40"))
    with no_orphans(refused):
        assert refused.wait() == 11, refused.text
    assert "model.0.bias is (36,) in the checkpoint and (40,) in the script; training was not started" in refused.text
    again = safepoint(output, "--nproc-per-node", "2", program=_program(output, "fsdp", "--unused"))
    with no_orphans(again):
        assert again.wait(120) == 0, again.text
    begun = torch.load(output / f"begun-{step}.pt", weights_only=True)
    assert torch.equal(begun["model"]["unused"], torch.ones(8))
    assert read_events(output, "finished")[0]["step"] == 20


@pytest.mark.long
@pytest.mark.parametrize(("kind", "before", "after"), [("fsdp", 2, 1), ("ddp", 2, 1), ("fsdp", 1, 3)])
def test_adapters_without_their_base(kind: str, before: int, after: int, tmp_path: Path) -> None:
    """Checkpoints hold only adapters; they resume on the same base, and another base is refused."""
    output = tmp_path / "run"
    step = _stop_in_the_first_epoch(output, before, _program(output, kind, "--lora"))
    names = _names_in(output / f"checkpoint-{step}", kind)
    assert len(names) == 4
    assert all("lora_" in name for name in names)
    other = _program(output, kind, "--lora", "--base-seed", "6")
    refused = safepoint(output, "--nproc-per-node", str(after), program=other)
    with no_orphans(refused):
        assert refused.wait(120) == 11, refused.text
    assert "the weights differ; training was not started" in refused.text
    again = safepoint(output, "--nproc-per-node", str(after), program=_program(output, kind, "--lora"))
    with no_orphans(again):
        assert again.wait(120) == 0, again.text
    _check_begun_as_ended(output, step)
    assert read_events(output, "finished")[0]["step"] == 20


def _names_in(checkpoint: Path, kind: str) -> list[str]:
    """The names of a model's weights."""
    if kind == "ddp":
        return list(torch.load(checkpoint / "model.pt", weights_only=True))
    metadata = FileSystemReader(checkpoint / "sharded").read_metadata()
    return [name for name in metadata.state_dict_metadata if name.startswith("model.")]
