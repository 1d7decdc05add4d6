"""Counts of Lightning's loops that contradict the manifest, and positions that no run of its size can have reached.

With a later epoch or step, Lightning would end the training at once, with exit code 0, as if it were complete. With a
position far in an endless stream, a start would read and drop batches without end.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.checkpoint.format.manifest import Manifest
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.training.plain.data.position import Position, excess_of
from tests.support.checkpoints import commit, prepared

_EVENTS = ("ready", "started", "processed", "completed")


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """After 12 steps of one batch of 4 samples: in the middle of the second of epochs with 8 batches."""
    output = prepared(tmp_path / "out")
    commit(output, 12, {0: {"lightning.ckpt": b"x"}})
    found = read_manifest(output.root / "checkpoint-12")
    return replace(found, epoch=1.5, samples_seen=48, global_batch=4, gradient_accumulation=1)


def _loops() -> dict[str, Any]:
    """What Lightning saves at this step."""
    epochs = {"ready": 2, "started": 2, "processed": 1, "completed": 1}
    steps = {"total": {"ready": 12, "completed": 12}, "current": {"ready": 4, "completed": 4}}
    return {
        "epoch_progress": {"total": dict(epochs), "current": dict(epochs)},
        "epoch_loop.state_dict": {"_batches_that_stepped": 12},
        "epoch_loop.batch_progress": {
            "total": dict.fromkeys(_EVENTS, 12), "current": dict.fromkeys(_EVENTS, 4), "is_last_batch": False,
        },
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": steps}},
        "epoch_loop.manual_optimization.optim_step_progress": {"total": {"ready": 0, "completed": 0}},
    }  # fmt: skip


def _contradiction(
    folder: Path, manifest: Manifest, fit_loop: Any, position: Position, *, is_automatic: bool = True
) -> str:
    from safepoint.training.integrations.lightning.lightning_parts import STATE, LightningParts

    torch.save({"loops": {"fit_loop": fit_loop}}, folder / STATE)
    parts: Any = LightningParts.__new__(LightningParts)
    module = SimpleNamespace(automatic_optimization=is_automatic)
    parts._trainer = SimpleNamespace(callbacks=[], accumulate_grad_batches=1, lightning_module=module)
    return parts.contradiction_in(folder, manifest, position)


def _set(*path: str, value: int) -> Callable[[dict[str, Any]], None]:
    def change(loops: dict[str, Any]) -> None:
        for name in path[:-1]:
            loops = loops[name]
        if path[-1] == "*":
            loops.update(dict.fromkeys(loops, value))
        else:
            loops[path[-1]] = value

    return change


_STEPS = ("epoch_loop.automatic_optimization.optim_progress", "optimizer", "step", "total", "*")
_BATCHES = "epoch_loop.batch_progress"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("epoch_progress", "current", "*", value=3), "have done 3 epochs, and the manifest says epoch 1.5"),
        (_set("epoch_progress", "current", "*", value=0), "have done 0 epochs"),
        (_set("epoch_progress", "total", "completed", value=2), "counts of epochs contradict"),
        (_set(*_STEPS, value=10**6), "1000000 optimizer steps, and the manifest says step 12"),
        (_set(*_STEPS, value=0), "have done 0 optimizer steps"),
        (_set(_BATCHES, "current", "*", value=1 << 53), "and its position in the data is after batch 4"),
        (
            _set(_BATCHES, "current", "completed", value=3),
            "have counted 3 completed, 4 processed, 4 ready and 4 started batches in the epoch, and its position",
        ),
        (_set(_BATCHES, "total", "completed", value=11), "counts of batches contradict"),
        (
            _set(_BATCHES, "is_last_batch", value=True),
            "say that batch 4 is the last batch of its epoch, and its position in the data is within the epoch",
        ),
        (_set(_BATCHES, "is_last_batch", value=1), "'is_last_batch' of a loop is 1"),
        (_set("epoch_loop.state_dict", "_batches_that_stepped", value=0), "counted 0 batches with a step"),
        (lambda loops: loops.clear(), "have no counts"),
    ],
)  # fmt: skip
def test_counts_that_contradict(
    manifest: Manifest, tmp_path: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    pytest.importorskip("lightning.pytorch")
    loops = copy.deepcopy(_loops())
    change(loops)
    found = _contradiction(tmp_path, manifest, loops, Position(epoch=1, batches=4))
    assert found.startswith("lightning.ckpt is invalid: ")
    assert reason in found


def test_counts_of_usual_checkpoints(manifest: Manifest, tmp_path: Path) -> None:
    """Also of a run that started from a checkpoint of Lightning, and of one that steps several optimizers itself."""
    pytest.importorskip("lightning.pytorch")
    place, loops = Position(epoch=1, batches=4), _loops()
    assert not _contradiction(tmp_path, manifest, loops, place)
    assert not _contradiction(tmp_path, replace(manifest, step=2), loops, place)
    loops["epoch_loop.manual_optimization.optim_step_progress"]["total"]["completed"] = 24
    assert not _contradiction(tmp_path, manifest, loops, place, is_automatic=False)


def test_positions_without_end(manifest: Manifest) -> None:
    """Also the position of one of several loaders."""
    for batches in (1 << 50, 10**6):
        assert f"after {batches} batches" in excess_of([Position(batches=4), Position(batches=batches)], manifest)
    assert not excess_of([Position(batches=4), Position(batches=1000)], manifest)
    # The last step had one batch, and the steps before had more.
    assert not excess_of([Position(batches=9000)], replace(manifest, samples_seen=36_000))
    assert excess_of([Position(batches=1 << 50)], replace(manifest, samples_seen=1 << 52))


def test_many_metrics() -> None:
    pytest.importorskip("lightning.pytorch")
    from safepoint.training.integrations.lightning.callback import _checked_metrics

    metrics = {f"val_{number}": torch.tensor(1.0) for number in range(10_001)}
    with pytest.raises(ValueError, match="10001 metrics, and 10000 is the limit"):
        _checked_metrics(metrics)
    for value in (torch.tensor(1j), torch.zeros(1, dtype=torch.uint8).view(torch.bits8), 1.0):
        with pytest.raises(ValueError, match="the metric 'val_x' must be a tensor in memory with one real number"):
            _checked_metrics({"val_x": value})
