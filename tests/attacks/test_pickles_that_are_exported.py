"""A checkpoint has a raw pickle with the name of a file of weights: other programs would unpickle it in an export."""

import io
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.checkpoint.tools import atomic_export, copy
from safepoint.checkpoint.tools.export import export_item
from safepoint.checkpoint.tools.inventory import open_inventory
from safepoint.errors import CheckpointError, TransientError
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location, Scheme
from tests.support.checkpoints import commit, prepared
from tests.support.stores import FaultyStore

_NAMES: tuple[str, ...] = (
    "2_Dense/pytorch_model.bin",
    "encoder.pt",
    "last.CKPT",
    "a/b.pth",
    "pytorch_model-00001-of-00002.bin",
)

_BESIDE: tuple[str, ...] = (
    *("tokenizer.pt", "tokenizer.CKPT", "vocab.pt", "vocab.pth", "chat_template.pth"),
    *("tokenizer_pytorch_model.bin", "tokenizer_config.pt"),
)
"""Names that an export of weights in pieces copies, too."""


def torch_saved() -> bytes:
    file = io.BytesIO()
    torch.save({"w": torch.ones(2)}, file)
    return file.getvalue()


def export(root: Path, files: dict[str, bytes], with_code: bool = False) -> list[str]:
    commit(prepared(root / "out"), 10, {0: files})
    inventory, _ = open_inventory(str(root / "out"))
    return copy.export(inventory, inventory.item(), Location.of_folder(root / "model"), with_code=with_code)


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


_PICKLE = pickle.dumps(None, 4)
_LAYOUTS = {
    "a model that loaders read": {"model.safetensors": b"weights"},
    "weights of torch.save": {"model.pt": torch_saved()},
    "weights of Lightning": {"lightning.ckpt": torch_saved()},
}
"""Of the second and third layout, the weights are exported by another way."""


def export_any(root: Path, files: dict[str, bytes], *, target: str = "model", with_code: bool = False) -> set[str]:
    """Export by the command's way, and return the files at the target that are no weights."""
    commit(prepared(root / "out"), 10, {0: files})
    inventory, _ = open_inventory(str(root / "out"))
    place = Location.of_folder(root / target)
    if target == "bucket":
        place = Location(scheme=Scheme.S3, bucket="bucket", path="model")
    return {
        name
        for name in export_item(inventory, inventory.item(), place, with_code=with_code)
        if name != "model.safetensors"
    }


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_beside_weights_of_each_layout(layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same names and contents are left out, whichever way exports the weights."""
    files = _LAYOUTS[layout]
    with caplog.at_level(logging.WARNING, "safepoint"):
        left = export_any(tmp_path, {**files, **dict.fromkeys(_BESIDE, _PICKLE), "tokenizer.json": b"{}"})
    assert left == {"tokenizer.json"}
    assert f"leaves out {len(_BESIDE)} files" in caplog.text
    assert "--with-code" in caplog.text


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("with_code", [False, True])
def test_what_may_be_beside_them(layout: str, with_code: bool, tmp_path: Path) -> None:
    """Archives are exported, and with `with_code` everything that a person trusts."""
    content = _PICKLE if with_code else torch_saved()
    files = {**_LAYOUTS[layout], **dict.fromkeys(_BESIDE, content)}
    assert export_any(tmp_path, files, with_code=with_code) == {*_BESIDE}


_ARCHIVE_FIRST = ("tokenizer.pt", b"PK\x03\x04", _PICKLE)
_MODULES_FIRST = ("modules.json", b"[]                       ", b'[{"type": "joblib.load"}]')
_WHOLE, _SAVED, _LIGHTNING = _LAYOUTS


@pytest.mark.parametrize("target", ["model", "bucket"])
@pytest.mark.parametrize(
    ("layout", "file", "has_manifest"),
    [
        (_WHOLE, _ARCHIVE_FIRST, True),
        (_WHOLE, _MODULES_FIRST, True),
        *((layout, _ARCHIVE_FIRST, known) for layout in (_SAVED, _LIGHTNING) for known in (True, False)),
    ],
)
def test_files_that_change_after_they_were_examined(
    layout: str,
    file: tuple[str, bytes, bytes],
    has_manifest: bool,
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner, or the server, shows other bytes to the first read. The manifest has the digest of the second read.

    What is written is examined, so the export ends with an error, and nothing is at the target.
    """
    name, shown, content = file
    read = LocalStore.read
    assert len(shown) == len(content)

    def showing(self: LocalStore, key: str, **options: Any) -> memoryview:
        return memoryview(shown) if key.endswith(name) else read(self, key, **options)

    monkeypatch.setattr(LocalStore, "read", showing)
    if not has_manifest:
        monkeypatch.setattr("safepoint.checkpoint.tools.export._stored_manifest", lambda folder: None)
    store = FaultyStore(tmp_path / "bucket")
    if target == "bucket":
        monkeypatch.setattr(atomic_export, "open_store", lambda location: store)
    with pytest.raises(CheckpointError, match=f"{name} has changed while it was read"):
        export_any(tmp_path, {**_LAYOUTS[layout], name: content}, target=target)
    assert not (tmp_path / "model").exists()
    assert not list(store.list())
