"""The phrases that docs/glossary.md refuses are in no text of this project."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = ["README.md", "CONTRIBUTING.md", "benchmarks", "docs", "examples", "src", "tests"]
SUFFIXES = {".json", ".md", ".py", ".toml"}
EXCEPT = [ROOT / "docs" / "glossary.md", Path(__file__)]
BANNED = re.compile(r"\b(cannot\s+be\s+meant|whoever|nobody|anew|told|is\s+said\s+so|settle[sd]?)\b", re.IGNORECASE)


def texts(root: Path) -> Iterator[Path]:
    """The files that the rule applies to."""
    for name in ROOTS:
        place = root / name
        files = [place] if place.is_file() else sorted(place.rglob("*"))
        yield from (path for path in files if path.suffix in SUFFIXES and path not in EXCEPT)


def findings(path: Path) -> Iterator[str]:
    """`file:line: phrase` for each phrase that is refused; one may run over the end of a line."""
    text = path.read_text()
    for found in BANNED.finditer(text):
        yield f"{path}:{text.count(chr(10), 0, found.start()) + 1}: {' '.join(found[0].split())}"


def test_no_text_has_a_refused_phrase(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message lists each place; docs/glossary.md names the words to use in their place."""
    monkeypatch.chdir(ROOT)
    found = [finding for path in texts(ROOT) for finding in findings(path.relative_to(ROOT))]
    assert not found, "\n".join(["docs/glossary.md lists the words to use instead of:", *found])


def test_a_refused_phrase_is_found(tmp_path: Path) -> None:
    """In any case, over the end of a line, and not inside another word."""
    path = tmp_path / "text.md"
    path.write_text("Whoever\nreads this cannot be\nmeant; unsettled, retold, nobody_at_all.\n")
    assert list(findings(path)) == [f"{path}:1: Whoever", f"{path}:2: cannot be meant"]
