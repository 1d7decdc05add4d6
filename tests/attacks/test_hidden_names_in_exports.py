"""A manifest lists files whose names begin with a dot: outside of a checkpoint, programs take them as settings."""

import logging
from pathlib import Path

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.tools import atomic_export, copy
from safepoint.checkpoint.tools.atomic_export import MARK
from safepoint.checkpoint.tools.inventory import open_inventory
from safepoint.storage.location import Location, Scheme
from tests.support.checkpoints import commit, prepared
from tests.support.stores import FaultyStore

_FILES = {
    "model.safetensors": b"weights",
    "config.json": b"{}",
    MARK: b"{}",
    ".safepoint/lock": b"x",
    ".git/hooks/post-checkout": b"#!/bin/sh",
    ".env": b"x",
    "onnx/.git/config": b"x",
}


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    folder = prepared(tmp_path / "out")
    commit(folder, 10, {0: _FILES})
    return folder


@pytest.mark.parametrize("is_store", [False, True])
def test_they_are_left_out(
    output: OutputFolder,
    tmp_path: Path,
    is_store: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a warning. The mark of an export in a store is Safepoint's own."""
    target = Location.of_folder(tmp_path / "model")
    if is_store:
        target = Location(scheme=Scheme.S3, bucket="bucket", path="model")
        monkeypatch.setattr(atomic_export, "open_store", lambda location: FaultyStore(tmp_path / location.path))
    inventory, _ = open_inventory(str(output.root))
    with caplog.at_level(logging.WARNING, "safepoint"):
        assert copy.export(inventory, inventory.item(), target) == ["config.json", "model.safetensors"]
    found = {path.relative_to(tmp_path / "model").as_posix() for path in (tmp_path / "model").rglob("*")}
    assert found == {"config.json", "model.safetensors"}
    assert "5 files" in caplog.text


def test_a_copy_keeps_them(output: OutputFolder, tmp_path: Path) -> None:
    """They stay in the checkpoint's own folder. A callback may have written them, and a resume verifies them."""
    inventory, _ = open_inventory(str(output.root))
    copy.copy(inventory, inventory.item(), Location.of_folder(tmp_path / "copy"))
    assert (tmp_path / "copy" / "checkpoint-10" / ".env").read_bytes() == b"x"
