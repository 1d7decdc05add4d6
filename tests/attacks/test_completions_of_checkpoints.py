"""The completions in a checkpoint, on which a trainer of TRL still has to train, are not what it has generated.

They are loaded without an error. The run would end in its next micro-batch, in each start, with an error of TRL or of
torch that names no file.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.errors import CheckpointError, PeerError
from safepoint.training.integrations.transformers.resume.counters import TrainerCounters
from safepoint.training.integrations.transformers.resume.trainer_resume import TrainerResume
from safepoint.training.integrations.transformers.resume.trainer_state import DeferredWork, LossTotals, RankState
from safepoint.training.state.data_only import load_data
from tests.unit.training.integrations.transformers.resume.test_trl_counters import Online


@pytest.mark.parametrize("completions", [5, [], "text", [7, 8], {"a": 1}], ids=repr)
def test_their_form_is_checked(completions: object) -> None:
    with pytest.raises(ValueError, match="not a list of micro-batches"):
        TrainerCounters(cycle={"_step": 3, "_buffered_inputs": completions}).restore(Online())


@pytest.mark.parametrize(
    "counted", [{"cycle": 5}, {"cycle": None}, {"figures": [1]}, {"numbers": 1}, {"is_training": 2}]
)
def test_the_other_counts_are_checked(counted: dict[str, Any], tmp_path: Path) -> None:
    loss = LossTotals(since_log=0.0, total=0.0, last_logged_step=0, first_step=0)
    state = RankState(loss=loss, pending=DeferredWork(), epoch_rng={}, elapsed_s=0.0)
    state.write(tmp_path, 0)
    path = tmp_path / "safepoint_state_0.pt"
    record = load_data(path)
    record["counted"] |= counted
    torch.save(record, path)
    with pytest.raises(CheckpointError, match="is not the state of a rank"):
        RankState.read(tmp_path, rank=0, ranks_before=1, world_size=1)


@pytest.fixture
def resume() -> TrainerResume:
    """At the first step after a resume: three micro-batches of the completions of the checkpoint are left."""
    trainer: Any = Online()
    TrainerCounters(cycle={"_step": 1, "_buffered_inputs": [{}, {}]}).restore(trainer)
    made = object.__new__(TrainerResume)
    vars(made).update(
        _trainer=trainer,
        _completions=trainer._buffered_inputs,
        _point=SimpleNamespace(path=Path("/out/checkpoint-10")),
    )
    return made


def fail(error: Exception) -> Any:
    def step(*_: Any) -> None:
        raise error

    return step


@pytest.mark.parametrize(
    "error", [KeyError("completion_ids"), IndexError("index out of range in self"), RuntimeError("sizes differ")]
)
def test_an_error_of_the_step_names_the_checkpoint(resume: TrainerResume, error: Exception) -> None:
    with pytest.raises(CheckpointError, match="/out/checkpoint-10 could not be loaded"):
        resume._training_step(fail(error))


@pytest.mark.parametrize("error", [PeerError("gone"), MemoryError(), RuntimeError("CUDA error")], ids=type)
def test_errors_with_other_causes_pass(resume: TrainerResume, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        resume._training_step(fail(error))
    assert caught.value is error


@pytest.mark.parametrize("when", ["at the end of the cycle", "with new completions"])
def test_errors_of_later_steps_pass(resume: TrainerResume, when: str) -> None:
    """Then the trainer generates completions, or trains on those that it has generated."""
    if when == "with new completions":
        resume._trainer._buffered_inputs = [{}, {}]
    else:
        resume._trainer._step = 4
    with pytest.raises(KeyError):
        resume._training_step(fail(KeyError("x")))
