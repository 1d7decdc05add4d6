"""A folder has the mark of an export that no export has written there."""

import json
from pathlib import Path

import pytest

from safepoint.checkpoint.tools.atomic_export import MARK, check_empty
from safepoint.errors import ConflictError
from safepoint.storage.location import Location


def test_a_mark_does_not_make_a_folder_empty(tmp_path: Path) -> None:
    """The files that it names are not those of an interrupted export; nothing is read before this is known."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / MARK).parent.mkdir()
    (tmp_path / MARK).write_text(json.dumps({"files": ["config.json"]}))
    with pytest.raises(ConflictError, match="not empty"):
        check_empty(Location.of_folder(tmp_path))
