"""The receipt of a checkpoint."""

from pathlib import Path

import pytest

from safepoint.checkpoint.tools.receipt import check_checkpoint
from safepoint.errors import CheckpointError
from tests.support.checkpoints import commit, prepared


def test_the_manifest_states_the_step(tmp_path: Path) -> None:
    """A person may have given another checkpoint the name of the one that was saved."""
    folder = commit(prepared(tmp_path), 10)
    receipt = check_checkpoint(str(tmp_path), 10, deep=True)
    assert (receipt.step, receipt.name, receipt.is_read) == (10, "checkpoint-10", True)
    folder.rename(tmp_path / "checkpoint-20")
    with pytest.raises(CheckpointError, match="no manifest of this step"):
        check_checkpoint(str(tmp_path), 20, deep=False)
