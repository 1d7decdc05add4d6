"""Digests of large files are those of their parts."""

from pathlib import Path

import pytest
import xxhash

from safepoint.checkpoint.format import digest
from safepoint.checkpoint.format.digest import digest_bytes, digest_file, digest_of_parts, num_parts
from safepoint.checkpoint.format.manifest import FileEntry


@pytest.mark.parametrize("size_bytes", [0, 1, 7, 8, 9, 16, 17, 100])
def test_parts_cover_the_file(size_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part's digest is that of its bytes, alone; a file of one part has none."""
    monkeypatch.setattr(digest, "PART_BYTES", 8)
    data = bytes(range(size_bytes))
    path = tmp_path / "file"
    path.write_bytes(data)
    found = digest_file(path)
    parts = tuple(digest_bytes(data[start : start + 8]) for start in range(0, size_bytes, 8))
    assert found.size_bytes == size_bytes
    assert found.parts == (parts if size_bytes > 8 else ())
    assert len(found.parts) == num_parts(size_bytes)
    assert found.digest == (digest_of_parts(parts) if size_bytes > 8 else digest_bytes(data))


def test_the_formula_is_the_documented_one(tmp_path: Path) -> None:
    """A file of 64 MiB and one byte: XXH3-128 of the two parts' 16 bytes each, one after the other."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(0, 2)
        file.write(b"x")
    first = xxhash.xxh3_128(bytes(64 << 20))
    second = xxhash.xxh3_128(b"x")
    assert digest_file(path).digest == f"xxh3-128:{xxhash.xxh3_128(first.digest() + second.digest()).hexdigest()}"


@pytest.mark.parametrize("change", ["missing", "too many", "swapped", "not a digest", "other digest"])
def test_parts_that_do_not_fit_are_refused(change: str) -> None:
    """Number, form and order of the parts' digests are checked before any byte is fetched."""
    good = [digest_bytes(b"a"), digest_bytes(b"b")]
    parts = {
        "missing": good[:1],
        "too many": [*good, good[0]],
        "swapped": good[::-1],
        "not a digest": [good[0], "md5:00"],
        "other digest": [good[0], digest_bytes(b"c")],
    }[change]
    with pytest.raises(ValueError, match="parts"):
        FileEntry(path="a", size_bytes=(64 << 20) + 1, digest=digest_of_parts(good), parts=tuple(parts))
