"""What a script's TrainingArguments may not ask for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.errors import UsageError
from safepoint.training.integrations.transformers.arguments import finish_settings
from tests.support.contexts import rank_context


def arguments(folder: Path, **changes: Any) -> Any:
    values = {
        "output_dir": str(folder),
        "save_strategy": "no",
        "save_only_model": False,
        "auto_find_batch_size": False,
        "enable_jit_checkpoint": False,
    }
    return SimpleNamespace(**values | changes)


@pytest.mark.parametrize("setting", ["save_only_model", "auto_find_batch_size"])
def test_what_cannot_be_resumed_is_refused(setting: str, tmp_path: Path) -> None:
    """With the setting and what to do."""
    finish_settings(arguments(tmp_path), rank_context())
    with pytest.raises(UsageError, match=f"the script sets {setting}=True") as refused:
        finish_settings(arguments(tmp_path, **{setting: True}), rank_context())
    assert "TrainingArguments" in str(refused.value)
