"""States of gradient scalers. torch loads their numbers without a check.

With a scale of 0, all weights become NaN in the next step. With an infinite scale, each step is left out. In both
cases the run goes on to its end without an error, and all its checkpoints have the result.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.errors import CheckpointError, ExitCode
from safepoint.foundation.environment import Place
from safepoint.snapshot.checkpointer import load_state
from safepoint.training.plain.state.parts import NamedParts
from safepoint.training.state.data_only import only_data
from tests.support.checkpoints import name_added_files
from tests.support.jobs import Job, no_orphans, safepoint

_HOSTILE = [
    {"scale": 0.0}, {"scale": -1.0}, {"scale": math.inf}, {"scale": math.nan}, {"scale": 10**400}, {"scale": "x"},
    {"scale": 1e300}, {"scale": True}, {"scale": torch.ones(5)}, {"growth_factor": "x"}, {"growth_factor": math.inf},
    {"backoff_factor": 0.0}, {"growth_interval": "x"}, {"growth_interval": 0}, {"growth_interval": 1 << 31},
    {"growth_interval": 2.0}, {"_growth_tracker": -1}, {"_growth_tracker": None},
]  # fmt: skip


def _as_session(folder: Path, scaler: Any) -> None:
    model = torch.nn.Linear(2, 2)
    torch.save(model.state_dict(), folder / "model.pt")
    NamedParts({"model": model, "scaler": scaler}, Place()).load(folder)


def _as_checkpointer(folder: Path, scaler: Any) -> None:
    load_state(folder, {"scaler": scaler})


def _as_framework(folder: Path, scaler: Any) -> None:
    """As the Trainer and Accelerate load it."""
    with only_data(folder):
        scaler.load_state_dict(torch.load(folder / "scaler.pt", weights_only=True))


_WAYS = [_as_session, _as_checkpointer, _as_framework]


@pytest.mark.parametrize("change", _HOSTILE)
@pytest.mark.parametrize("load", _WAYS)
def test_a_number(load: Callable[[Path, Any], None], change: dict[str, Any], tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    torch.save({**scaler.state_dict(), **change}, tmp_path / "scaler.pt")
    with pytest.raises(CheckpointError, match="gradient scaler"):
        load(tmp_path, scaler)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("state", [5, [1.0], {1: 2}])
def test_no_dictionary(state: Any, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "scaler.pt")
    with pytest.raises(CheckpointError, match="gradient scaler"):
        _as_framework(tmp_path, torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("load", _WAYS)
def test_what_torch_saves(load: Callable[[Path, Any], None], tmp_path: Path) -> None:
    """Also that of a scaler that is switched off, which is empty."""
    saved = torch.amp.GradScaler("cpu", init_scale=2.0**-20, growth_interval=7)
    for one in (saved, torch.amp.GradScaler("cpu", enabled=False)):
        torch.save(one.state_dict(), tmp_path / "scaler.pt")
        fresh = torch.amp.GradScaler("cpu", enabled=one.is_enabled())
        load(tmp_path, fresh)
        assert fresh.state_dict() == one.state_dict()


_PROGRAM = """
import sys, torch
from transformers import Trainer, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return {"x": torch.ones(4)}

class Model(torch.nn.Module):
    def __init__(self): super().__init__(); self.inner = torch.nn.Linear(4, 1)
    def forward(self, x): return {"loss": self.inner(x).square().mean()}

class Scaling(Trainer):
    def _load_scaler(self, checkpoint):
        self.accelerator.scaler = torch.amp.GradScaler("cpu")  # as with 16 bits on a GPU
        super()._load_scaler(checkpoint)
        self.accelerator.scaler = None

args = TrainingArguments(sys.argv[1], max_steps=int(sys.argv[2]), report_to=[], use_cpu=True, disable_tqdm=True)
Scaling(model=Model(), args=args, train_dataset=Data()).train()
"""


@pytest.mark.timeout(240)
def test_a_trainer(tmp_path: Path) -> None:
    """The Trainer loads this file with a method of its own. All that is loaded there is data, too."""
    output, program = tmp_path / "out", tmp_path / "program.py"
    program.write_text(_PROGRAM)

    def run(steps: int, log: str) -> Job:
        words = [str(program), str(output), str(steps)]
        options = ("--max-restarts", "0", "--save-steps", "1", "--save-strategy", "steps")
        return safepoint(output, *options, program=words, log=tmp_path / log)

    job = run(1, "first")
    with no_orphans(job):
        assert job.wait(100) == ExitCode.OK, job.text
    folder = output / "checkpoint-1"
    torch.save({**torch.amp.GradScaler("cpu").state_dict(), "scale": 0.0}, folder / "scaler.pt")
    name_added_files(folder)
    job = run(2, "second")
    with no_orphans(job):
        assert job.wait(100) == ExitCode.NOTHING_VALID, job.text
    assert "scaler.pt" in job.text
