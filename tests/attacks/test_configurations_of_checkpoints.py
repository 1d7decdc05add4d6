"""The configuration of a model in a checkpoint, which the Trainer reads only to compare versions."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import CheckpointError
from safepoint.training.state.data_only import only_data


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_sparse_file(name: str, tmp_path: Path) -> None:
    """It takes no room on the disk, its digests are easy to compute, and the Trainer would read all of it."""
    path = tmp_path / name
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match="larger than"), only_data(tmp_path):
        pytest.fail("a framework would read it")


@pytest.mark.parametrize("content", ["", "5", '{"a":' * 9999, "[" * 5_000_000, '{"a": ' + f"{10**400}}}"])
def test_another_content(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match="was not loaded"), only_data(tmp_path):
        pytest.fail("a framework would read it")


@pytest.mark.parametrize("version", ["\x1b]0;title\x07", "5.0\n\x1b[2J", 5, ["5.0"]])
def test_a_version_that_would_move_the_cursor(version: Any, tmp_path: Path) -> None:
    """The Trainer prints it if it is another one than its own."""
    (tmp_path / "config.json").write_text(json.dumps({"transformers_version": version}))
    with pytest.raises(CheckpointError, match="cannot be printed"), only_data(tmp_path):
        pytest.fail("the Trainer would print it")


@pytest.mark.parametrize(
    "content", ["{}", '{"transformers_version": null}', '{"transformers_version": "5.0", "a": NaN}']
)
def test_a_good_one(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with only_data(tmp_path):
        pass
