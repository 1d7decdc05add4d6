"""A checkpoint has files that Python, or a tool, runs when a person starts it in the folder of the exported model."""

import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.checkpoint.tools import obeyed_names
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
    "psutil.py",
    "sympy.py",
    "google/__init__.py",
    "IPython/__init__.py",
    "wandb/settings",
    "wandb.py",
    "pylintrc",
    "gunicorn.conf.py",
    "ansible.cfg",
    "jupyter_server_config.py",
    "jupyter_config.json",
    "ipython_config.py",
    "manage.py",
    "webpack.config.mjs",
    "gulpfile.js",
    "Tiltfile",
    "config.properties",
    "evil-1.0.dist-info/entry_points.txt",
    "Evil.egg-info/entry_points.txt",
    "EGG-INFO/entry_points.txt",
    "google/protobuf/__init__.py",
    "google/cloud/storage/client.py",
    "jax_plugins/evil/__init__.py",
    "nvidia/cublas/lib/libcublas.so.12",
    "__pycache__/modeling_chatglm.cpython-311.pyc",
    "modeling_chatglm.pyc",
    "modeling_chatglm.cpython-311-x86_64-linux-gnu.so",
    "custom_generate/generate.pyc",
    "python.exe",
    "matplotlibrc",
    "supervisord.conf",
    "celeryconfig.py",
    "Caddyfile",
    "BUILD",
    "build.gradle.kts",
    "main.tf",
]
_KEPT = [
    "1_Pooling/config.json",
    "README.md",
    "added_tokens.json",
    "config.json",
    "configuration_chatglm.py",
    "configuration_utils.py",
    "custom_generate/generate.py",
    "model.safetensors",
    "model.weights.egg.bin",
    "modeling_chatglm.py",
    "modeling_utils.py",
    "onnx/json/weights.bin",
    "onnx/model.onnx",
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


def test_nothing_runs_where_a_model_was_exported(tmp_path: Path) -> None:
    """Python looks in the current folder for installed packages, and their entry points name what torch imports."""
    plugin = b"print('an attack ran')"
    files = {
        "evil-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n",
        "evil-1.0.dist-info/entry_points.txt": b"[torch.backends]\nevil = modeling_evil:init\n",
        "google/protobuf/__init__.py": plugin,
        "modeling_evil.py": plugin,
        "config.json": b"{}",
        "model.safetensors": b"x",
    }
    output = prepared(tmp_path / "out")
    commit(output, 10, {0: files})
    inventory, _ = open_inventory(str(output.root))
    export(inventory, inventory.item(), Location.of_folder(tmp_path / "model"))
    program = "import importlib.metadata as m; [one.load() for one in m.entry_points(group='torch.backends')]"
    program += "\ntry:\n import google.protobuf\nexcept ImportError: pass"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "model", capture_output=True, text=True, check=True
    )
    assert "attack" not in found.stdout


@pytest.mark.parametrize("path", _RUN)
def test_each_name(path: str) -> None:
    assert is_obeyed(path)


@pytest.mark.parametrize("path", _KEPT)
def test_names_of_models(path: str) -> None:
    assert not is_obeyed(path)


def test_modules_that_are_installed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No list names them all."""
    place = tmp_path / "site-packages"
    (place / "a_package_without_a_file").mkdir(parents=True)
    for name in ("one_module.py", "compiled.cpython-311-x86_64-linux-gnu.so"):
        (place / name).touch()
    monkeypatch.syspath_prepend(place)
    obeyed_names._installed.cache_clear()
    package = "a_package_without_a_file"
    for path in ("one_module.py", "One_Module.pyc", "compiled.py", f"{package}/__init__.py", f"{package}/a/b.py"):
        assert is_obeyed(path), path
    assert not is_obeyed("another_module.py")
    assert not is_obeyed("custom_generate/one_module.py")
    monkeypatch.undo()
    obeyed_names._installed.cache_clear()
    assert not is_obeyed("one_module.py")
