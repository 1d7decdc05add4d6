"""A checkpoint has files that Python, or a tool, runs when a person starts it in the folder of the exported model."""

from pathlib import Path

import pytest

from safepoint.checkpoint.tools.copy import export
from safepoint.checkpoint.tools.export import export_pieces, is_in_pieces
from safepoint.checkpoint.tools.inventory import open_inventory
from safepoint.checkpoint.tools.obeyed_names import is_obeyed
from safepoint.storage.location import Location
from tests.support.checkpoints import commit, prepared

_RUN = [
    "-rf",
    "json.py",
    "json.cpython-311-x86_64-linux-gnu.so",
    "json.pyc",
    "Random.py",
    "torch.py",
    "transformers/__init__.py",
    "numpy/__init__.cpython-311-x86_64-linux-gnu.so",
    "tokenizers.py",
    "sitecustomize.pyc",
    "sitecustomize/__init__.py",
    "usercustomize.so",
    "__main__.pyc",
    "onnx/conftest.py",
    "tasks.py",
    "uv.toml",
    "UV.toml",
    "CMakeLists.txt",
    "onnx/Makefile",
    "flake.nix",
    "docker-compose.override.yml",
]
_KEPT = [
    "README.md",
    "added_tokens.json",
    "config.json",
    "configuration_chatglm.py",
    "custom_generate/generate.py",
    "model.safetensors",
    "modeling_chatglm.py",
    "onnx/json/weights.bin",
    "quantization.py",
    "requirements.txt",
    "tokenization_chatglm.py",
    "tokenizer.model",
    "vocab.txt",
]


def test_an_export_leaves_them_out(tmp_path: Path) -> None:
    output = prepared(tmp_path / "out")
    commit(output, 10, {0: dict.fromkeys([*_RUN, *_KEPT], b"x")})
    inventory, _ = open_inventory(str(output.root))
    assert export(inventory, inventory.item(), Location.of_folder(tmp_path / "model")) == _KEPT


def test_an_export_of_pieces_leaves_them_out(tmp_path: Path) -> None:
    """Beside the weights it copies files by patterns such as `tokenizer.*`."""
    torch = pytest.importorskip("torch")
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save({"weight": torch.ones(2)}, folder / "model.pt")
    for name in ("tokenizers.py", "tokenizer.json", "vocab.txt", "tokenizer.py"):
        (folder / name).write_text("x")
    store = open_inventory(str(folder))[0].store
    assert is_in_pieces(store)
    found = export_pieces(store, "", Location.of_folder(tmp_path / "model"))
    assert "tokenizers.py" not in found
    assert {"tokenizer.json", "vocab.txt"} < set(found)


@pytest.mark.parametrize("path", _RUN)
def test_each_name(path: str) -> None:
    assert is_obeyed(path)


@pytest.mark.parametrize("path", _KEPT)
def test_names_of_models(path: str) -> None:
    assert not is_obeyed(path)
