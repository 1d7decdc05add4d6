"""Records with a digest of themselves: the error for one that is too large."""

import pytest

from safepoint.checkpoint.format import sealed_record
from safepoint.errors import SaveError


def test_a_record_that_is_too_large_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its format, because checkpoints and process images have different remedies, and the hint has both."""
    monkeypatch.setattr(sealed_record, "MAX_RECORD_BYTES", 100)
    with pytest.raises(SaveError, match=r"\(safepoint-image\).* at most 100 can be read") as caught:
        sealed_record.seal({"format": "safepoint-image", "files": ["a" * 100]})
    assert "process image" in (caught.value.hint or "")
