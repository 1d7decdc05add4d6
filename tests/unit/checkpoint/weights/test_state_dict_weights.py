"""A model in one file of torch's, as sessions, Accelerate and Lightning write it, becomes safetensors."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from safepoint.checkpoint.tools.export import export_pieces, is_in_pieces
from safepoint.errors import CheckpointError
from safepoint.storage.browsing import browse
from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store
from safepoint.storage.store import Store
from tests.support.checkpoints import commit, prepared


def stored(folder: Path) -> Store:
    return open_store(parse_location(str(folder)))


class Hostile:
    """Makes a folder as soon as it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def model() -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 5, bias=False))
    made[2].weight = torch.nn.Parameter(torch.randn(7, 5).t())  # in another order
    return made


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model_fsdp.bin", "lightning.ckpt", "model.ckpt"])
def test_the_model_is_exported(name: str, tmp_path: Path) -> None:
    """Every weight and buffer, and nothing of the training; nothing of the file is run."""
    state = model().state_dict()
    content: Any = state
    if name.endswith("ckpt"):
        content = {"state_dict": state, "hyper_parameters": Hostile(tmp_path / "ran"), "optimizer_states": [{"a": 1}]}
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    torch.save(content, folder / name)
    torch.save({"state": torch.ones(3)}, folder / "optimizer.pt")
    assert is_in_pieces(browse(stored(folder)))
    target = tmp_path / "model"
    assert export_pieces(stored(folder), "", parse_location(str(target))) == ["model.safetensors"]
    found = load_file(target / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            {"layer.weight": torch.ones(2), "layer._extra_state": {"scale": 1}},
            "layer._extra_state in model.pt is no tensor",
        ),
        (OrderedDict(), "holds no weights"),
        (torch.ones(2), "holds no weights"),
    ],
    ids=["more than tensors", "nothing", "a tensor"],
)
def test_what_is_no_model_is_refused(content: Any, text: str, tmp_path: Path) -> None:
    """With the reason."""
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    torch.save(content, folder / "model.pt")
    with pytest.raises(CheckpointError, match=text):
        export_pieces(stored(folder), "", parse_location(str(tmp_path / "model")))
    assert not (tmp_path / "model").exists()


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    """What the manifest names is compared first."""
    torch.save(model().state_dict(), tmp_path / "model.pt")
    folder = commit(prepared(tmp_path / "out"), 3, {0: {"model.pt": (tmp_path / "model.pt").read_bytes()}})
    export_pieces(stored(folder), "", parse_location(str(tmp_path / "good")))
    data = bytearray((folder / "model.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.pt in .* is not what was saved"):
        export_pieces(stored(folder), "", parse_location(str(tmp_path / "bad")))


def test_safetensors_are_taken_as_they_are(tmp_path: Path) -> None:
    """A folder that has them besides is copied."""
    torch.save(model().state_dict(), tmp_path / "model.pt")
    (tmp_path / "model.safetensors").touch()
    assert not is_in_pieces(browse(stored(tmp_path)))
