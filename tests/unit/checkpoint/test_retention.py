"""Retention: pure, and it never bites."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.retention import select_superseded


@given(
    steps=st.lists(st.integers(0, 1000), unique=True, max_size=20),
    keep=st.integers(1, 5),
    chosen=st.sets(st.integers(0, 19), max_size=3),
)
def test_the_newest_and_the_protected_stay(steps: list[int], keep: int, chosen: set[int]) -> None:
    """At most the limit remains, except for what is protected; the newest always does."""
    committed = [Path(f"checkpoint-{step}") for step in sorted(steps, reverse=True)]
    protected = {committed[index] for index in chosen if index < len(committed)}
    superseded = select_superseded(committed, keep_newest=keep, protected=protected)
    kept = [path for path in committed if path not in superseded]
    assert kept[:1] == committed[:1]
    assert protected <= set(kept)
    assert len(kept) <= max(keep, len(protected | set(committed[:1])))
    if len(committed) >= keep:
        assert len(kept) >= keep


def test_without_a_limit_everything_stays() -> None:
    """None keeps all; a limit below one is an error and not an empty folder."""
    assert select_superseded([Path("checkpoint-1")], keep_newest=None) == []
    with pytest.raises(ValueError, match="keep_newest 0"):
        select_superseded([Path("checkpoint-1")], keep_newest=0)
