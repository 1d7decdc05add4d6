"""Which packages a program imports, by its source."""

import sys
from pathlib import Path

import pytest

from safepoint.training.rank_processes.preload_list import Wanted, own_names, wanted_imports

SCRIPT = """
from __future__ import annotations
import os, numpy
import torch.utils.data
from transformers import Trainer, TrainingArguments
from typing import TYPE_CHECKING
import helpers
from parts import layers
from . import nothing
import no_such_package
if TYPE_CHECKING:
    import pandas
try:
    import yaml
except ImportError:
    import pyarrow
else:
    import tqdm
try:
    import packaging
except* ImportError:
    import pyarrow
else:
    import regex
finally:
    import filelock
with open(__file__):
    from numpy import *
def later():
    import scipy
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A script with a module, a package and imports of all kinds."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helpers.py").write_text("import jinja2, helpers, train\nraise RuntimeError('executed')\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "parts" / "layers.py").write_text("import safetensors.torch\n")
    return tmp_path


def test_imports_of_installed_packages_are_found_and_nothing_is_executed(project: Path) -> None:
    """In the order of the source, then those of the project's own files; not what runs later, or never."""
    found = wanted_imports((str(project / "train.py"), "--lr", "1"), is_module=False)
    assert found == [
        Wanted(module="numpy"),
        Wanted(module="torch.utils.data"),
        Wanted(module="transformers", names=("Trainer", "TrainingArguments")),
        Wanted(module="yaml"),
        Wanted(module="tqdm"),
        Wanted(module="packaging"),
        Wanted(module="regex"),
        Wanted(module="filelock"),
        Wanted(module="jinja2"),
        Wanted(module="safetensors.torch"),
    ]
    assert "helpers" not in sys.modules


def test_a_module_is_found_in_the_folder_or_in_an_installed_package(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `python -m` would find it."""
    monkeypatch.chdir(project)
    assert Wanted(module="safetensors.torch") in wanted_imports(("parts.layers",), is_module=True)
    assert "torch" in {wanted.package for wanted in wanted_imports(("torch.utils.collect_env",), is_module=True)}
    assert wanted_imports(("no_such_module",), is_module=True) == []


def test_a_package_that_the_project_hides_is_not_wanted(project: Path) -> None:
    """A file beside the script is imported in place of an installed package of that name."""
    (project / "yaml.py").write_text("")
    found = wanted_imports((str(project / "train.py"),), is_module=False)
    assert "yaml" not in {wanted.module for wanted in found}
    assert {"yaml", "helpers", "parts", "train"} <= own_names(str(project))
    assert own_names(str(project / "missing")) == set()


@pytest.mark.parametrize("text", ["import (", "\0", "x = " + "(" * 5000, "import numpy\n" + "a" * (5 << 20)])
def test_a_source_that_cannot_be_read_wants_nothing(text: str, tmp_path: Path) -> None:
    """The rank reports the error when it runs the program."""
    (tmp_path / "train.py").write_text(text)
    assert wanted_imports((str(tmp_path / "train.py"),), is_module=False) == []
