"""Compares two finished runs bit for bit."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

_TIMES = {
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
}


def logged(output: Path, end: str = "final") -> list[dict[str, Any]]:
    """Everything that the run logged, without times."""
    entries = json.loads((output / end / "log.json").read_text())
    return [{name: value for name, value in entry.items() if name not in _TIMES} for entry in entries]


def samples(output: Path) -> dict[int, list[int]]:
    """The samples that all ranks have seen in each step, if they print them (`--tell-samples`)."""
    seen: dict[int, list[int]] = defaultdict(list)
    for path in output.glob("samples-*"):
        for line in path.read_text().splitlines():
            step, indices = json.loads(line)
            seen[step] += indices
    return {step: sorted(indices) for step, indices in seen.items()}


def same(one: object, other: object) -> bool:
    """Whether two nested values of tensors and plain values are equal bit for bit, in the same order."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        # Bits: packed weights, seen as numbers, are such that are unequal to themselves.
        return torch.equal(*(each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in (one, other)))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def finals(output: Path, num_ranks: int) -> list[dict[str, object]]:
    """What each rank saved at the end as `final-RANK.pt`."""
    return [
        torch.load(output / f"final-{rank}.pt", map_location="cpu", weights_only=False) for rank in range(num_ranks)
    ]


def assert_same_run(output: Path, reference: Path) -> None:
    """Final weights, optimizer state and every logged value are equal."""
    assert logged(output) == logged(reference)
    ours, theirs = (load_file(folder / "final" / "model.safetensors") for folder in (output, reference))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), f"{name} differs"
    ours, theirs = (
        torch.load(folder / "final" / "optimizer.pt", weights_only=True) for folder in (output, reference)
    )
    assert ours["param_groups"] == theirs["param_groups"]
    for index, state in theirs["state"].items():
        for name, value in state.items():
            assert torch.equal(ours["state"][index][name], value), f"optimizer state {index}.{name} differs"
