"""A tree deeper than any path, and folders that cannot be listed: the checkpoints beside them stay usable."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.checkpoint.format.verify import verify
from safepoint.foundation.files import delete_tree
from tests.support.checkpoints import commit, prepared
from tests.support.commands import safepoint


def dig(place: Path, name: str, depth: int) -> None:
    """Create folders in folders, deeper than a path can name."""
    here = os.open(place, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        deeper = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=here))
    os.close(here)


@pytest.fixture(params=["long names", "many folders"])
def deep(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    output = prepared(tmp_path / "out")
    for step in (3, 4):
        commit(output, step)
    if request.param == "long names":
        for place in ("elsewhere", "checkpoint-4", ".safepoint/work"):
            (output.root / place).mkdir(exist_ok=True)
            dig(output.root / place, "x" * 250, 40)
    else:
        dig(output.trash, "d", 1100)
        dig(output.root / "checkpoint-4", "d", 50)
    yield output.root
    delete_tree(output.root)  # pytest's own removal is recursive


@pytest.mark.timeout(120)
def test_commands_go_on(deep: Path) -> None:
    """Good checkpoints are as good as before, and a damaged one with such a tree in it is moved aside."""
    listed = safepoint("checkpoints", "list", deep)
    assert listed.code == 0, listed.stderr
    assert verify(deep / "checkpoint-3").is_valid
    (deep / "checkpoint-4/model.safetensors").write_bytes(b"damaged")
    assert safepoint("checkpoints", "verify", deep / "checkpoint-3").code == 0
    assert safepoint("checkpoints", "verify", deep).code == 14
    assert safepoint("checkpoints", "copy", deep / "checkpoint-3", deep.parent / "copy").code == 0
    assert safepoint("checkpoints", "export", deep / "checkpoint-3", deep.parent / "model").code == 0
    done = safepoint("checkpoints", "prune", deep, "--keep", "newest=1")
    assert "Traceback" not in done.stderr
    assert (deep / "checkpoint-3").is_dir()
    done = safepoint("checkpoints", "repair", deep, "--drop-damaged")
    assert done.code == 0, done.stderr
    assert not (deep / "checkpoint-4").exists()
    assert list((deep / ".safepoint/work").iterdir()) == []
    assert list((deep / ".safepoint/trash").iterdir()) == []
    assert safepoint("checkpoints", "verify", deep).code == 0


@pytest.mark.skipif(shutil.which("true") is None, reason="no programs")
def test_deleting_needs_no_recursion(tmp_path: Path) -> None:
    """Neither the interpreter's limit nor that of descriptors ends it."""
    dig(tmp_path, "d", 1500)
    (tmp_path / "d/link").symlink_to(tmp_path)
    delete_tree(tmp_path / "d")
    assert list(tmp_path.iterdir()) == []
