"""Whether a module is there, without running it."""

from pathlib import Path

import pytest

from safepoint.foundation.modules import is_importable


def test_what_python_would_find(tmp_path: Path) -> None:
    """In the folder it starts in, and where everything is installed; nothing of it runs."""
    (tmp_path / "mine.py").write_text("raise SystemExit('was run')")
    assert is_importable("mine", str(tmp_path))
    assert is_importable("json.tool", str(tmp_path))
    assert not is_importable("mine", str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("name", ["no_such_module", "no.such.mod", "", ".json"])
def test_what_it_would_not(name: str, tmp_path: Path) -> None:
    """Nor what is no name at all."""
    assert not is_importable(name, str(tmp_path))
