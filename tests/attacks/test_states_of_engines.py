"""States of DeepSpeed's engine: its loss scaler, its clipping of gradients, and its counters.

DeepSpeed takes them from the checkpoint unchecked. The number of steps becomes a part of a path: with a text in its
place, the next save would be written to a folder of the attacker's choice.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.errors import CheckpointError
from safepoint.training.integrations.transformers.sharding.repartition import Repartition
from safepoint.training.state.engine_states import checked_engine

_DYNAMIC = {
    "cur_scale": 65536.0, "cur_iter": 7, "last_overflow_iter": -1, "cur_hysteresis": 2, "scale_window": 1000,
    "min_scale": 1, "dynamic": True,
}  # fmt: skip


class _Engine(SimpleNamespace):
    """Like DeepSpeed's."""

    __module__ = "deepspeed.runtime.engine"


def engine(*, is_dynamic: bool = True) -> Any:
    scaler = SimpleNamespace(**(_DYNAMIC if is_dynamic else {"cur_scale": 1.0, "dynamic": False}))
    optimizer = SimpleNamespace(loss_scaler=scaler, clip_grad=1.0, dynamic_loss_scale=is_dynamic, overflow=False)
    return _Engine(optimizer=optimizer, global_steps=4, global_samples=32, skipped_steps=0)


@pytest.mark.parametrize("name", ["global_steps", "global_samples", "skipped_steps"])
@pytest.mark.parametrize("value", ["/../../../tmp/x", torch.tensor(4), 2.5, -1, None, True, [4]])
def test_a_counter(name: str, value: Any) -> None:
    one = engine()
    with pytest.raises(CheckpointError, match=name), checked_engine(one, "checkpoint-4"):
        setattr(one, name, value)


@pytest.mark.parametrize(
    "change",
    [
        {"cur_scale": 0.0}, {"cur_scale": -1.0}, {"cur_scale": math.inf}, {"cur_scale": math.nan}, {"cur_scale": "x"},
        {"cur_scale": 1e300}, {"cur_scale": torch.ones(2)}, {"cur_iter": "x"}, {"cur_iter": -1},
        {"last_overflow_iter": 1.5}, {"cur_hysteresis": None},
    ],
)  # fmt: skip
def test_a_dynamic_scaler(change: dict[str, Any]) -> None:
    one = engine()
    with pytest.raises(CheckpointError, match=next(iter(change))), checked_engine(one, "checkpoint-4"):
        one.optimizer.loss_scaler = SimpleNamespace(**{**_DYNAMIC, **change})


def test_the_scale_goes_on() -> None:
    """What a dynamic scaler has counted comes from the checkpoint; its settings and its methods are the script's."""
    one = engine()
    own = one.optimizer.loss_scaler
    saved = {**_DYNAMIC, "cur_scale": 128.0, "cur_iter": 9, "scale_window": 1, "update_scale": 5}
    with checked_engine(one, "checkpoint-4"):
        one.optimizer.loss_scaler = SimpleNamespace(**saved)
        one.global_steps = 9
    assert one.optimizer.loss_scaler is own
    assert vars(own) == {**_DYNAMIC, "cur_scale": 128.0, "cur_iter": 9}
    assert one.global_steps == 9


@pytest.mark.parametrize("loaded", [None, 5, "x", SimpleNamespace(cur_scale=0.0)])
def test_a_scale_that_is_a_setting(loaded: Any) -> None:
    """Without a dynamic scale, nothing of the scaler comes from the checkpoint."""
    one = engine(is_dynamic=False)
    with checked_engine(one, "checkpoint-4"):
        one.optimizer.loss_scaler = loaded
    assert vars(one.optimizer.loss_scaler) == {"cur_scale": 1.0, "dynamic": False}


@pytest.mark.parametrize("value", [1e-30, "x", None, -1.0])
def test_settings(value: Any) -> None:
    one = engine()
    with checked_engine(one, "checkpoint-4"):
        one.optimizer.clip_grad = one.optimizer.dynamic_loss_scale = value
    assert (one.optimizer.clip_grad, one.optimizer.dynamic_loss_scale) == (1.0, True)


def test_without_zero() -> None:
    """DeepSpeed then changes the numbers of its scaler in place."""
    config = SimpleNamespace(cur_scale=64.0, cur_iter=3, scale_factor=2.0, dynamic_loss_scale=True)
    one = SimpleNamespace(optimizer=SimpleNamespace(loss_scale_config=config, clip_grad=1.0), global_steps=4)
    with checked_engine(one, "checkpoint-4"):
        config.cur_scale, config.scale_factor = 32.0, 0.0
    assert (config.cur_scale, config.scale_factor) == (32.0, 2.0)
    with pytest.raises(CheckpointError, match="cur_scale"), checked_engine(one, "checkpoint-4"):
        config.cur_scale = 0.0


def _loading(one: Any, state: dict[str, Any]) -> Any:
    """An engine that loads this state of its scheduler."""
    one.load_checkpoint = lambda load_dir, tag=None: one.lr_scheduler.load_state_dict(state)
    return one


@pytest.mark.parametrize(
    "change", [{"last_epoch": "x"}, {"get_lr": 5}, {"optimizer": {}}, {"lr_lambdas": [{"x": 1}]}]
)
def test_the_scheduler(change: dict[str, Any], tmp_path: Path) -> None:
    """DeepSpeed loads it together with the model, and not where the Trainer loads schedulers."""
    weight = torch.nn.Parameter(torch.ones(2))
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([weight], lr=0.1), lambda step: 1.0)
    one = engine()
    one.lr_scheduler = scheduler
    (tmp_path / "latest").write_text("global_step4")
    loader = object.__new__(Repartition)
    loader._copy = None
    loader._copy_later = lambda path: None
    _loading(one, {**scheduler.state_dict(), **change})
    with pytest.raises(CheckpointError, match="scheduler"):
        loader.load(lambda engine, path: engine.load_checkpoint(path), one, tmp_path)
