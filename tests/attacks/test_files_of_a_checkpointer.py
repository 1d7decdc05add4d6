"""A checkpoint that a `Checkpointer` loads has files that it never writes, or that its manifest does not list."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.errors import CheckpointError
from safepoint.snapshot.checkpointer import Checkpointer, load_state
from tests.support.checkpoints import commit, prepared


def saved(value: object) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def test_a_stray_is_not_loaded(tmp_path: Path) -> None:
    """The script has a new value since the checkpoint was saved, and a stranger has added a file for it."""
    folder = commit(prepared(tmp_path), 10, {0: {"known.pt": saved({"a": 1})}})
    (folder / "extra.pt").write_bytes(saved({"a": 666}))
    known: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(KeyError, match=r"no extra\.pt"):
            checkpointer.load({"known": known, "extra": extra})
        assert (known, extra) == ({}, {})
        assert checkpointer.load({"known": known}) == 10
    assert known == {"a": 1}


class Part:
    """An object of the script with a state."""

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("content", [5, [1, 2], "text", None], ids=repr)
@pytest.mark.parametrize("kind", [lambda: torch.nn.Linear(2, 2), dict, Part], ids=["module", "dictionary", "object"])
def test_an_error_names_the_file(kind: Any, content: object, tmp_path: Path) -> None:
    (tmp_path / "part.pt").write_bytes(saved(content))
    with pytest.raises(CheckpointError, match=r"part\.pt could not be loaded"):
        load_state(tmp_path, {"part": kind()})
