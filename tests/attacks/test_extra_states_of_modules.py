"""Modules that unpickle a state of their own, as the FP8 layers of Transformer Engine do.

The pickle is in a tensor of bytes. The file with this tensor contains nothing but data, and its digest is right.
"""

import base64
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from safepoint.errors import CheckpointError
from safepoint.foundation.environment import Place
from safepoint.snapshot.checkpointer import load_state
from safepoint.training.integrations.transformers.resume.kept_models import _load
from safepoint.training.plain.state.parts import NamedParts
from safepoint.training.state.data_only import load_data, only_data
from tests.support.pickles import Call

_READERS = {
    "loads": pickle.loads,
    "load": lambda data: pickle.load(io.BytesIO(data)),
    "Python": lambda data: pickle._Unpickler(io.BytesIO(data)).load(),  # pyright: ignore
    "torch": lambda data: torch.load(io.BytesIO(data), weights_only=False),
    "text": lambda data: pickle.loads(base64.b64decode(base64.b64encode(data))),
}

_SIZE = 2000


class Fp8(torch.nn.Linear):
    """`set_extra_state` is that of `transformer_engine.pytorch.module.base`."""

    def __init__(self, read: Any = pickle.loads, scale: Any = 1.0) -> None:
        super().__init__(2, 2)
        self.read, self.scale = read, scale

    def get_extra_state(self) -> torch.Tensor:
        file = io.BytesIO()
        (torch.save if self.read is _READERS["torch"] else pickle.dump)({"scale": self.scale}, file)
        data = file.getvalue()
        padded = (len(data).to_bytes(4, "little") + data).ljust(_SIZE, b"\0")  # a session compares the sizes
        return torch.frombuffer(bytearray(padded), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        data = state.numpy().tobytes()
        self.scale = self.read(data[4:][: int.from_bytes(data[:4], "little")])["scale"]


def _by_trainer(folder: Path, saved: Any, model: Any) -> None:
    safetensors.torch.save_file(saved, folder / "model.safetensors")
    with only_data(folder):
        model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"), strict=False)


def _by_accelerate(folder: Path, saved: Any, model: Any) -> None:
    torch.save(saved, folder / "pytorch_model.bin")
    with only_data(folder):
        model.load_state_dict(torch.load(folder / "pytorch_model.bin"))


def _by_session(folder: Path, saved: Any, model: Any) -> None:
    torch.save(saved, folder / "model.pt")
    NamedParts({"model": model}, Place()).load(folder)


def _by_checkpointer(folder: Path, saved: Any, model: Any) -> None:
    torch.save(saved, folder / "model.pt")
    load_state(folder, {"model": model})


def _as_teacher(folder: Path, saved: Any, model: Any) -> None:
    torch.save(saved, folder / "safepoint_kept_teacher.pt")
    _load("teacher", model, load_data(folder / "safepoint_kept_teacher.pt"), folder)


_LOADS = [_by_trainer, _by_accelerate, _by_session, _by_checkpointer, _as_teacher]


@pytest.mark.parametrize("reader", _READERS)
@pytest.mark.parametrize("load", _LOADS)
def test_code_in_an_extra_state(load: Any, reader: str, tmp_path: Path) -> None:
    hostile = torch.nn.Sequential(Fp8(_READERS[reader], Call(tmp_path / "called")))
    model = torch.nn.Sequential(Fp8(_READERS[reader]))
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(CheckpointError, match=r"was not loaded: .* names posix.mkdir, and loading it could run code"):
        load(tmp_path / "checkpoint-2", hostile.state_dict(), model)
    assert not (tmp_path / "called").exists()
    assert "set_extra_state" not in vars(model[0])


@pytest.mark.parametrize("load", _LOADS)
def test_data_in_an_extra_state(load: Any, tmp_path: Path) -> None:
    model = Fp8()
    load(tmp_path, Fp8(scale=[2.0, {"a": 5}]).state_dict(), model)
    assert model.scale == [2.0, {"a": 5}]


def test_a_class_that_the_script_allows(tmp_path: Path) -> None:
    model = Fp8()
    allowed: list[Any] = [Path, type(tmp_path)]
    with torch.serialization.safe_globals(allowed):
        _by_session(tmp_path, Fp8(scale=tmp_path).state_dict(), model)
    assert model.scale == tmp_path


def test_other_loads_of_the_script(tmp_path: Path) -> None:
    """Before training starts, the script loads its own files as always."""
    saved, model = Fp8(scale=tmp_path).state_dict(), Fp8()
    _by_session(tmp_path, Fp8().state_dict(), model)
    model.load_state_dict(saved)
    assert model.scale == tmp_path
