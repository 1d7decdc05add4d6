"""A checkpoint has a raw pickle with the name of a file of weights: other programs would unpickle it in an export."""

import io
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.checkpoint.tools import copy
from safepoint.checkpoint.tools.inventory import open_inventory
from safepoint.errors import CheckpointError, TransientError
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location
from tests.support.checkpoints import commit, prepared

_NAMES = ("2_Dense/pytorch_model.bin", "encoder.pt", "last.CKPT", "a/b.pth", "pytorch_model-00001-of-00002.bin")


def torch_saved() -> bytes:
    file = io.BytesIO()
    torch.save({"w": torch.ones(2)}, file)
    return file.getvalue()


def export(root: Path, files: dict[str, bytes], **options: bool) -> list[str]:
    commit(prepared(root / "out"), 10, {0: files})
    inventory, _ = open_inventory(str(root / "out"))
    return copy.export(inventory, inventory.item(), Location.of_folder(root / "model"), **options)


@pytest.mark.parametrize("content", [*(pickle.dumps({"w": 1}, number) for number in range(6)), b"", b"GGUF"])
def test_it_is_left_out(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In any version of pickle. The warning states the option with which it is exported."""
    files = {"model.safetensors": b"weights", **dict.fromkeys(_NAMES, content)}
    with caplog.at_level(logging.WARNING, "safepoint"):
        assert export(tmp_path, files) == ["model.safetensors"]
    assert "leaves out 5 files" in caplog.text
    assert "--with-code" in caplog.text


def test_no_other_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing was exported"):
        export(tmp_path, {"pytorch_model.bin": pickle.dumps({"w": 1})})
    assert not (tmp_path / "model").exists()


def test_archives_are_exported(tmp_path: Path) -> None:
    files = dict.fromkeys(_NAMES, torch_saved())
    assert export(tmp_path, files) == sorted(files)


def test_a_person_who_trusts_them(tmp_path: Path) -> None:
    files = dict.fromkeys(_NAMES, pickle.dumps(1))
    assert export(tmp_path, files, with_code=True) == sorted(files)


def test_a_store_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export with fewer weights would look complete, so it ends with the error of the store."""
    commit(prepared(tmp_path / "out"), 10, {0: {"model.safetensors": b"weights", "encoder.pt": torch_saved()}})
    inventory, _ = open_inventory(str(tmp_path / "out"))
    read = LocalStore.read

    def failing(self: LocalStore, key: str, **options: Any) -> memoryview:
        if key.endswith("encoder.pt"):
            raise TransientError("the store is busy")
        return read(self, key, **options)

    monkeypatch.setattr(LocalStore, "read", failing)
    with pytest.raises(TransientError):
        copy.export(inventory, inventory.item(), Location.of_folder(tmp_path / "model"))
    assert not (tmp_path / "model").exists()
