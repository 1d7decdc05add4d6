"""A power loss right after a folder was created: every folder on the way to what was committed keeps its name."""

import os
from pathlib import Path

import pytest

from safepoint.checkpoint.local.final_model import adopt_scripts_model, final_folder, note_end
from safepoint.checkpoint.local.output_folder import OutputFolder
from tests.support.checkpoints import commit, describe, prepared
from tests.support.commands import safepoint


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The folders and files that were fsynced, by the names that they had then."""
    found: set[Path] = set()
    real = os.fsync

    def noting(descriptor: int) -> None:
        real(descriptor)
        found.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", noting)
    return found


def assert_durable(path: Path, base: Path, synced: set[Path]) -> None:
    """Each folder from `base` to `path` was fsynced after the name in it was there."""
    while path != base:
        assert path.parent in synced, path
        path = path.parent


@pytest.mark.parametrize("create", [OutputFolder.check_usable, OutputFolder.prepare])
def test_a_new_output_folder(create: object, tmp_path: Path, synced: set[Path]) -> None:
    """Its own name, and those of the folders above it that were missing."""
    output = OutputFolder(tmp_path / "a/b/out")
    assert callable(create)
    create(output)
    assert_durable(output.root, tmp_path, synced)


def test_a_relative_output_folder(tmp_path: Path, synced: set[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder holds its name."""
    monkeypatch.chdir(tmp_path)
    OutputFolder(Path("out")).prepare()
    assert tmp_path in synced
    OutputFolder(Path("deep/er/out")).prepare()
    assert_durable(tmp_path / "deep/er/out", tmp_path, synced)


def test_a_final_model_that_waits_for_the_store(tmp_path: Path, synced: set[Path]) -> None:
    """It is committed below `.safepoint`, so that this name counts too."""
    output = prepared(tmp_path / "out")
    end = note_end(output, describe(9))
    (output.root / "model.safetensors").write_bytes(b"weights")
    assert adopt_scripts_model(output, end)
    assert_durable(final_folder(output), tmp_path, synced)


@pytest.mark.parametrize("target", ["model", "new/deep/model"])
def test_an_export(target: str, tmp_path: Path, synced: set[Path]) -> None:
    """The files, the folders in it, its own name and the folders above it that were missing."""
    output = prepared(tmp_path / "out")
    files = {0: {"model.safetensors": b"weights" * 9, "config.json": b"{}", "onnx/model.onnx": b"x"}}
    commit(output, 4, files)
    synced.clear()
    done = safepoint("checkpoints", "export", output.root / "checkpoint-4", tmp_path / target)
    assert done.code == 0, done.stderr
    model = tmp_path / target
    assert_durable(model, tmp_path, synced)
    names = {
        path.relative_to(path.parents[len(path.relative_to(model.parent).parts) - 2]) for path in model.rglob("*")
    }
    durable = {Path(*path.parts[len(model.parent.parts) + 1 :]) for path in synced if model.parent in path.parents}
    assert names <= durable, (names, durable)
    assert Path() in durable  # the folder itself


def test_a_copy_and_a_repair(tmp_path: Path, synced: set[Path]) -> None:
    """The target of a copy, and the folder that damaged checkpoints are moved to."""
    output = prepared(tmp_path / "out")
    folder = commit(output, 4)
    assert safepoint("checkpoints", "copy", folder, tmp_path / "new/copy").code == 0
    assert_durable(tmp_path / "new/copy/checkpoint-4", tmp_path, synced)
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert safepoint("checkpoints", "repair", output.root, "--drop-damaged").code == 0
    [aside] = output.root.glob("set-aside-*")
    assert_durable(aside / "checkpoint-4", tmp_path, synced)
