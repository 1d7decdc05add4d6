"""A checkpoint has files that a program runs or obeys when a person starts it in the folder of the exported model.

So an export writes data only, of the kinds that models consist of.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.tools.copy import export
from safepoint.checkpoint.tools.export import export_pieces, is_in_pieces
from safepoint.checkpoint.tools.inventory import open_inventory
from safepoint.checkpoint.tools.model_files import is_exported
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
    "AGENTS.md",
    "CLAUDE.md",
    "onnx/GEMINI.md",
    "mcp.json",
    "opencode.json",
    "mkdocs.yml",
    "dbt_project.yml",
    "environment.yml",
    "alembic.ini",
    "scrapy.cfg",
    "go.work",
    "tsconfig.json",
    "composer.json",
    "xmake.lua",
    "configure",
    "setup.sh",
    "Modelfile",
    "Session.vim",
    "index.html",
    "autorun.inf",
    "model.pkl",
    "model.joblib",
    "train.ipynb",
    "\u017fetup.cfg",
    "pac\u212aage.json",
    "setup.cfg::$DATA",
    "pyproject.toml.",
    "pyvenv.cfg",
    "__pypackages__/3.11/lib/x/data.json",
    "lib/python3.11/site-packages/x/data.json",
    "node_modules/x/data.json",
    "evil.pth.so",
    "crush.json",
    "wrangler.json",
    "serverless.json",
    "dub.json",
    "dagger.json",
    "lefthook.json",
    "cz.json",
    "voila.json",
    "bsconfig.json",
    "npm-shrinkwrap.json",
    "mcp_settings.json",
    "AGENTS.txt",
    "onnx/crush.json",
]
_CODE = [
    "1/model.py",
    "code/inference.py",
    "configuration_chatglm.py",
    "custom_generate/generate.py",
    "handler.py",
    "modeling_chatglm.py",
    "tokenization_chatglm.py",
]
_KEPT = [
    "1_Pooling/config.json",
    "LICENSE",
    "README.md",
    "added_tokens.json",
    "config.json",
    "model.safetensors",
    "model.weights.egg.bin",
    "onnx/json/weights.bin",
    "onnx/model.onnx",
    "requirements.txt",
    "tokenizer.model",
    "vocab.bpe",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "tekken.json",
    "normalizer.json",
    "params.json",
    "emoji.json",
    "quantize_config.json",
    "id2label.json",
    "all_results.json",
    "vocab.json",
    "source.spm",
]


@pytest.mark.parametrize("with_code", [False, True])
def test_an_export_leaves_them_out(with_code: bool, tmp_path: Path) -> None:
    """The code of a model is exported on request."""
    output = prepared(tmp_path / "out")
    without = [path for path in _RUN if not path.endswith(".py")]
    commit(output, 10, {0: dict.fromkeys([*without, *_CODE, *_KEPT], b"x")})
    inventory, _ = open_inventory(str(output.root))
    target = Location.of_folder(tmp_path / "model")
    found = export(inventory, inventory.item(), target, with_code=with_code)
    assert found == sorted([*_KEPT, *(_CODE if with_code else [])])


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
    assert found == ["model.safetensors", "tokenizer.json", "vocab.txt"]
    found = export_pieces(store, "", Location.of_folder(tmp_path / "code"), with_code=True)
    assert {"tokenizer.py", "tokenizers.py"} < set(found)


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


@pytest.mark.parametrize(
    ("types", "is_exported"),
    [
        (["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"], True),
        (["sentence_transformers.models.Transformer", "modeling_evil.Evil"], False),
        (["sentence_transformers.models.Transformer", "joblib.numpy_pickle.load"], False),
        (["sentence_transformers.evil"], False),
        (["sentence_transformers_evil.Evil"], False),
        ([5], False),
    ],
)
def test_what_a_configuration_names(types: list[Any], is_exported: bool, tmp_path: Path) -> None:
    """Loaders of other libraries import it, some without `trust_remote_code`, and call it with a path of a file."""
    output = prepared(tmp_path / "out")
    modules = [{"idx": number, "name": "0", "path": "", "type": one} for number, one in enumerate(types)]
    files = {"config.json": b"{}", "model.safetensors": b"x", "modules.json": json.dumps(modules).encode()}
    commit(output, 10, {0: {**files, "modeling_evil.py": b"x"}})
    inventory, _ = open_inventory(str(output.root))
    found = export(inventory, inventory.item(), Location.of_folder(tmp_path / "model"))
    assert found == sorted(files if is_exported else {*files} - {"modules.json"})
    found = export(inventory, inventory.item(), Location.of_folder(tmp_path / "code"), with_code=True)
    assert "modules.json" in found


@pytest.mark.parametrize("content", [b"", b"{}", b"5", b"[5]", b"\xff", b"[" * 100_000])
def test_what_is_no_list_of_modules(content: bytes, tmp_path: Path) -> None:
    output = prepared(tmp_path / "out")
    commit(output, 10, {0: {"model.safetensors": b"x", "0/Modules.json": content}})
    inventory, _ = open_inventory(str(output.root))
    found = export(inventory, inventory.item(), Location.of_folder(tmp_path / "model"))
    assert found == ["model.safetensors"]


@pytest.mark.parametrize("path", [*_RUN, *_CODE])
def test_each_name(path: str) -> None:
    assert not is_exported(path)
    assert is_exported(path, with_code=True) == path.endswith(".py")


@pytest.mark.parametrize("path", _KEPT)
def test_names_of_models(path: str) -> None:
    assert is_exported(path)
