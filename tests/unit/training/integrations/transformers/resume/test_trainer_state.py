"""What a boundary remembers, and what that costs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerControl

from safepoint.training.integrations.transformers.resume.trainer_state import (
    DeferredWork,
    LoaderState,
    LossTotals,
    RankState,
    RollbackPoint,
)


class Quantized(torch.nn.Module):
    """As GPTQ and AWQ keep a layer: buffers in the place of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.arange(64, dtype=torch.int32))
        self.register_buffer("qzeros", torch.zeros(4, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(4))


class Trained(Quantized):
    """Not below adapters: what it holds may change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))


def trainer(model: torch.nn.Module) -> Any:
    state = SimpleNamespace(global_step=3, num_input_tokens_seen=0, epoch=0.5, log_history=[{"loss": 1.0}])
    return SimpleNamespace(
        model=model,
        state=state,
        _tr_loss=torch.zeros(()),
        current_flos=0.0,
        callback_handler=SimpleNamespace(callbacks=[EarlyStoppingCallback(2), object()]),
        control=TrainerControl(),
    )


PLACE = LoaderState(epoch_rng={}, loader=None, generators=[])


def test_a_quantized_model_below_adapters_is_not_copied() -> None:
    """At a boundary of accumulated steps; running statistics beside it are, and come back."""
    model = torch.nn.Sequential(Quantized(), torch.nn.BatchNorm1d(4), Trained())
    moment = RollbackPoint(trainer(model), DeferredWork(), PLACE, with_buffers=True)
    assert not [name for name in moment._buffers if name.startswith("0.")]
    assert {"1.running_mean", "2.qweight", "2.scales"} <= moment._buffers.keys()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(1)
    moment.restore(trainer(model))
    assert not model[1].running_mean.any()
    assert torch.equal(model[2].qweight, torch.arange(64, dtype=torch.int32))


def test_scales_that_belong_to_no_codes_are_copied() -> None:
    """The name alone says nothing."""
    model = torch.nn.Module()
    model.register_buffer("scales", torch.ones(4))
    assert list(RollbackPoint(trainer(model), DeferredWork(), PLACE, with_buffers=True)._buffers) == [".scales"]


def test_the_end_of_a_step_does_not_wait_for_its_device() -> None:
    """The norm of the gradients stays there until a checkpoint is written; one of `meta` cannot be read."""
    pending = DeferredWork.after_step(trainer(torch.nn.Module()), torch.empty((), device="meta"), 0.1)
    assert isinstance(pending.grad_norm, torch.Tensor)


def test_a_norm_is_written_as_a_number(tmp_path: Path) -> None:
    """Whatever the Trainer gave."""
    loss = LossTotals(since_log=0.0, total=0.0, last_logged_step=0, first_step=0)
    for given, number in ((torch.tensor(0.5), 0.5), (0.25, 0.25), (None, None)):
        pending = DeferredWork.after_step(trainer(torch.nn.Module()), given, None)
        RankState(loss=loss, pending=pending, epoch_rng={}, elapsed_s=0.0).write(tmp_path, 0)
        read = RankState.read(tmp_path, rank=0, ranks_before=1, world_size=1)
        assert read is not None
        assert read.pending == DeferredWork(grad_norm=number)


def test_what_the_first_of_two_evaluation_sets_has_counted_is_undone() -> None:
    """Its log line, the patience that it took, and the stop that followed."""
    now = trainer(torch.nn.Module())
    patience = now.callback_handler.callbacks[0]
    patience.early_stopping_patience_counter = 1
    moment = RollbackPoint(now, DeferredWork(evaluate=True), PLACE, with_buffers=False)
    now.state.log_history.append({"eval_one_loss": 2.0})
    patience.early_stopping_patience_counter = 2
    now.control.should_training_stop = True
    moment.restore(now)
    assert now.state.log_history == [{"loss": 1.0}]
    assert patience.early_stopping_patience_counter == 1
    assert not now.control.should_training_stop
