"""A checkpoint contains files that programs obey because of their names, such as `safepoint.toml`.

After an export, a copy, or a resume from a bucket, these files belong to the user. So a look at their owner does not
show that another person has chosen their content, and `safepoint submit` in this folder would run that person's
program.
"""

import logging
import os
import shutil
from pathlib import Path

import pytest

from safepoint.checkpoint.tools import copy
from safepoint.checkpoint.tools.inventory import open_inventory
from safepoint.foundation.configuration import TRUSTED_FOLDERS, Configuration
from safepoint.storage.location import Location
from tests.support.checkpoints import commit, prepared

_SETTINGS = b'[submit]\nenv = ["PYTHONPATH=/evil"]\n[pvc]\ndata = "/evil"\n'
_OF_PYTHON = b'[tool.safepoint.submit]\nenv = ["PYTHONPATH=/evil"]\n'
_OBEYED = {
    "safepoint.toml": _SETTINGS,
    "pyproject.toml": _OF_PYTHON,
    "sub/safepoint.toml": _SETTINGS,
    "Safepoint.TOML": _SETTINGS,
    "sitecustomize.py": b"raise SystemExit(1)",
    "setup.py": b"raise SystemExit(1)",
    "Makefile": b"all:",
    "conftest.py": b"",
}
_MODEL = {"model.safetensors": b"weights", "config.json": b"{}"}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = prepared(tmp_path / "out")
    commit(folder, 10, {0: {**_MODEL, **_OBEYED}})
    return folder.root


def load(folder: Path, **variables: str) -> Configuration:
    return Configuration.load(folder, {"XDG_CONFIG_HOME": str(folder / "none"), **variables})


def test_an_export_leaves_them_out(output: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inventory, _ = open_inventory(str(output))
    with caplog.at_level(logging.WARNING, "safepoint"):
        exported = copy.export(inventory, inventory.item(), Location.of_folder(tmp_path / "model"))
    assert exported == sorted(_MODEL)
    assert {path.name for path in (tmp_path / "model").rglob("*")} == set(_MODEL)
    assert f"{len(_OBEYED)} files" in caplog.text


@pytest.mark.parametrize("place", ["", "sub"])
@pytest.mark.parametrize("is_copied", [False, True])
def test_settings_in_a_checkpoint_do_not_count(output: Path, tmp_path: Path, place: str, is_copied: bool) -> None:
    """Also in a folder below the manifest. A warning names the checkpoint."""
    if is_copied:
        inventory, _ = open_inventory(str(output))
        copy.copy(inventory, inventory.item(), Location.of_folder(tmp_path / "copy"))
        output = tmp_path / "copy"
    folder = output / "checkpoint-10" / place
    found = load(folder)
    assert not found.tables
    assert not found.pvc
    assert str(output / "checkpoint-10") in found.ignored[0]
    assert load(folder, **{TRUSTED_FOLDERS: str(folder)}).tables


def test_a_link_into_a_checkpoint(output: Path, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "safepoint.toml").symlink_to(output / "checkpoint-10" / "safepoint.toml")
    assert not load(tmp_path / "project").tables


def test_a_project_with_checkpoints(output: Path) -> None:
    """The settings beside and above checkpoints count as before."""
    shutil.copy(output / "checkpoint-10" / "safepoint.toml", output / "safepoint.toml")
    assert load(output).tables
    assert not load(output).ignored


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_record_of_another_user_above_a_project(output: Path, tmp_path: Path) -> None:
    """In a folder such as /tmp, it does not hide the settings of the projects there."""
    shared = tmp_path / "shared"
    (shared / "project").mkdir(parents=True)
    shared.chmod(0o1777)
    shutil.copy(output / "checkpoint-10" / "safepoint-manifest.json", shared)
    os.chown(shared / "safepoint-manifest.json", 65534, 65534)
    (shared / "project" / "safepoint.toml").write_bytes(_SETTINGS)
    assert load(shared / "project").tables
