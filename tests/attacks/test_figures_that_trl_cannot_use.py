"""The figures that a trainer of TRL averages for its log have a form with which TRL cannot compute.

They were set on the trainer. The next log line ended the run, in each start, with an error that names no file; or
each save failed. Other figures replaced a record of the Trainer, such as the loss that chooses the best checkpoint.
"""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.errors import CheckpointError
from safepoint.training.integrations.transformers.resume.counters import TrainerCounters
from safepoint.training.integrations.transformers.resume.trainer_state import (
    DeferredWork,
    LossTotals,
    RankState,
    RollbackPoint,
)
from safepoint.training.state.data_only import load_data
from tests.unit.training.integrations.transformers.resume.test_trl_counters import Online

_LOSS = LossTotals(since_log=0.0, total=0.0, last_logged_step=0, first_step=0)


def deep(levels: int) -> Any:
    value: Any = [1.0]
    for _ in range(levels):
        value = {"a": value}
    return value


def in_train(entries: Any) -> dict[str, Any]:
    return {"train": entries, "eval": {}}


_INVALID: dict[str, Any] = {
    "a number": in_train({"entropy": 5}),
    "a mapping": in_train({"entropy": {"a": 1}}),
    "a text": in_train({"entropy": "12"}),
    "nested lists": in_train({"entropy": [[1], [2]]}),
    "a mode that is a list": in_train([1.0]),
    "deep mappings": in_train(deep(100)),
    "a tensor without memory": in_train({"entropy": [torch.zeros(1, device="meta")]}),
    "a complex tensor": in_train({"entropy": [torch.zeros(1, dtype=torch.complex64)]}),
    "a sparse tensor": in_train({"entropy": [torch.ones(1).to_sparse()]}),
    "a tensor with a huge number": in_train({"entropy": [torch.full((1,), 1 << 60)]}),
    "a huge number": in_train({"entropy": [1 << 60]}),
    "None": in_train({"entropy": [None]}),
    "a long name": in_train({"a" * 201: [1.0]}),
    "a long mode": {"train": {}, "eval": {}, "a" * 201: {}},
    "many names": in_train({f"a{number}": [1.0] for number in range(10_001)}),
}


@pytest.mark.parametrize("name", ["_metrics", "_stored_metrics"])
@pytest.mark.parametrize("kind", _INVALID)
def test_the_file_of_a_rank_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    """When the checkpoint is chosen, so an older one is taken."""
    state = RankState(loss=_LOSS, pending=DeferredWork(), epoch_rng={}, elapsed_s=0.0)
    state.write(tmp_path, 0)
    path = tmp_path / "safepoint_state_0.pt"
    record = load_data(path)
    record["counted"]["figures"] = {name: _INVALID[kind]}
    torch.save(record, path)
    with pytest.raises(CheckpointError, match=rf"safepoint_state_0\.pt is not the state of a rank.*{name}"):
        RankState.read(tmp_path, rank=0, ranks_before=1, world_size=1)


@pytest.mark.parametrize("tokens", [1e308, float("inf"), float("nan"), -1, 1 << 60, [1], "x", True])
def test_numbers_of_tokens(tokens: Any) -> None:
    with pytest.raises(ValueError, match="_total_train_tokens"):
        TrainerCounters(figures={"_total_train_tokens": tokens}).restore(Online())


def test_tensors_become_numbers() -> None:
    """A tensor would reach the log, and the Trainer cannot save a tensor in its log."""
    trainer = Online()
    values = [torch.ones(1), torch.ones((), dtype=torch.bfloat16), torch.tensor(True), 2, float("nan")]
    TrainerCounters(figures={"_metrics": {"train": {}, "eval": {"entropy": values}}}).restore(trainer)
    assert repr(trainer._metrics["eval"]["entropy"]) == "[1.0, 1.0, True, 2, nan]"


def test_own_records_and_empty_lists_are_left_out() -> None:
    trainer = Online()
    entries = {name: [-1e9] for name in ("loss", "eval_loss", "step", "epoch", "learning_rate", "grad_norm")}
    both = {"train": {**entries, "empty": [], "kl": [1.0]}, "eval": {**entries, "empty": [], "kl": [2.0]}}
    TrainerCounters(figures={"_metrics": both}).restore(trainer)
    assert trainer._metrics == {"train": {"kl": [1.0]}, "eval": {"kl": [2.0]}}
    assert isinstance(trainer._metrics["train"], defaultdict)


def test_figures_of_another_form_are_not_saved(tmp_path: Path) -> None:
    """A trainer of the script may keep such figures: its checkpoints must not be refused."""
    figures = {"_metrics": in_train({"entropy": 5}), "_total_train_tokens": 7}
    counted = TrainerCounters(figures=figures)
    RankState(loss=_LOSS, pending=DeferredWork(), epoch_rng={}, elapsed_s=0.0, counted=counted).write(tmp_path, 0)
    state = RankState.read(tmp_path, rank=0, ranks_before=1, world_size=1)
    assert state is not None
    assert state.counted.figures == {"_total_train_tokens": 7}


def test_a_rollback_restores_all() -> None:
    """Figures of this process are not from a file. A refusal would lose the step that is being saved."""
    trainer: Any = Online()
    trainer.state = SimpleNamespace(global_step=3, num_input_tokens_seen=0, log_history=[], stateful_callbacks={})
    trainer.callback_handler = SimpleNamespace(callbacks=[])
    trainer.control = SimpleNamespace(should_training_stop=False, should_epoch_stop=False)
    trainer._tr_loss, trainer.current_flos = torch.zeros(()), 0
    own: Any = {"loss": [1.0], "a" * 300: [1 << 60], "empty": [], "tensor": [torch.ones(2)]}
    trainer._metrics["train"].update(own)
    point = RollbackPoint(trainer, DeferredWork(), SimpleNamespace(), with_buffers=False)  # pyright: ignore
    trainer._metrics["train"].clear()
    point.restore(trainer)
    assert trainer._metrics["train"].keys() == own.keys()
