"""Files of `torch.save`, read without torch and without running anything of them."""

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.checkpoint.weights.inert_pickle import Inert, read_inert
from safepoint.checkpoint.weights.torch_file import StoredTensor, read_torch_file
from safepoint.errors import CheckpointError


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
