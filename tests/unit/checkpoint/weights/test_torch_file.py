"""Files of `torch.save`, read without torch and without running anything of them."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from safepoint.checkpoint.tools.export import export_pieces, is_in_pieces
from safepoint.checkpoint.weights.torch_file import Inert, StoredTensor, read_inert, read_torch_file
from safepoint.errors import CheckpointError
from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store
from safepoint.storage.store import Store
from tests.support.checkpoints import commit, prepared


def bytes_of(tensor: StoredTensor) -> bytes:
    run = tensor.run(0, tensor.count, 0)
    with run.path.open("rb") as file:
        file.seek(run.offset)
        return file.read(run.num_bytes)


TENSORS = {
    "float": torch.randn(3, 4),
    "half": torch.randn(5).half(),
    "brain": torch.randn(2, 2).bfloat16(),
    "long": torch.arange(7),
    "bool": torch.tensor([True, False]),
    "number": torch.tensor(2.5),
    "view": torch.arange(100.0)[10:20],
    "parameter": torch.nn.Parameter(torch.randn(4)),
    "eight": torch.randn(4).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("name", list(TENSORS))
def test_tensors_are_found(name: str, tmp_path: Path) -> None:
    """Type, shape and every byte."""
    tensor = TENSORS[name]
    torch.save({"first": torch.ones(3), "it": tensor}, tmp_path / "file.pt")
    found = read_torch_file(tmp_path / "file.pt")["it"]
    assert isinstance(found, StoredTensor)
    assert f"torch.{found.dtype}" == str(tensor.dtype)
    assert found.sizes == tuple(tensor.shape)
    assert bytes_of(found) == tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_an_archive_inside_a_file(tmp_path: Path) -> None:
    """As DCP's files are made of them."""
    buffer = io.BytesIO()
    torch.save(torch.arange(5.0), buffer)
    content = buffer.getvalue()
    (tmp_path / "file").write_bytes(b"x" * 100 + content + b"y" * 77)
    found = read_torch_file(tmp_path / "file", begin=100, length=len(content))
    assert bytes_of(found) == torch.arange(5.0).numpy().tobytes()


class Hostile:
    def __reduce__(self) -> Any:
        return eval, ("__import__('pathlib').Path('/tmp/safepoint-was-run').touch()",)


def test_nothing_is_run(tmp_path: Path) -> None:
    """What a pickle calls is remembered, and not called."""
    trap = Path("/tmp/safepoint-was-run")
    trap.unlink(missing_ok=True)
    torch.save({"trap": Hostile(), "settings": {"lr": 0.1}, "order": OrderedDict(a=1)}, tmp_path / "file.pt")
    content = read_torch_file(tmp_path / "file.pt")
    assert not trap.exists()
    assert isinstance(content["trap"], Inert)
    assert content["settings"] == {"lr": 0.1}
    assert content["order"] == {"a": 1}


def test_states_of_objects_are_kept() -> None:
    """By the names of their attributes."""
    found = read_inert(pickle.dumps(pytest.UsageError("text")))
    assert isinstance(found, Inert)
    with pytest.raises(CheckpointError, match="has no size"):
        found.get("size")


@pytest.mark.parametrize("cut", [0, 1, 30, 200, -1, -30])
def test_what_is_cut_off_is_refused(cut: int, tmp_path: Path) -> None:
    """At any place."""
    path = tmp_path / "file.pt"
    torch.save({"it": torch.ones(30)}, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError):
        read_torch_file(path)


def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    """Sizes come from the pickle, and a pickle can say anything."""
    path = tmp_path / "file.pt"
    torch.save({"it": torch.ones(3)}, path)
    target = tmp_path / "hostile.pt"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(target, "w") as hostile:
        for info in archive.infolist():
            content = archive.read(info)
            if info.filename.endswith("data.pkl"):
                assert content.count(b"K\x03\x85") == 1
                content = content.replace(b"K\x03\x85", b"K\xff\x85")
            hostile.writestr(info.filename, content)
    with pytest.raises(CheckpointError, match="larger than its storage"):
        read_torch_file(target)


def stored(folder: Path) -> Store:
    return open_store(parse_location(str(folder)))


class Harmful:
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
        content = {
            "state_dict": state,
            "hyper_parameters": Harmful(tmp_path / "ran"),
            "optimizer_states": [{"a": 1}],
        }
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    torch.save(content, folder / name)
    torch.save({"state": torch.ones(3)}, folder / "optimizer.pt")
    assert is_in_pieces(stored(folder))
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
            "layer._extra_state in model.pt is not a tensor",
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
    with pytest.raises(CheckpointError, match=r"model\.pt in .* has changed since it was saved"):
        export_pieces(stored(folder), "", parse_location(str(tmp_path / "bad")))


def test_safetensors_are_taken_as_they_are(tmp_path: Path) -> None:
    """A folder that has them besides is copied."""
    torch.save(model().state_dict(), tmp_path / "model.pt")
    (tmp_path / "model.safetensors").touch()
    assert not is_in_pieces(stored(tmp_path))
