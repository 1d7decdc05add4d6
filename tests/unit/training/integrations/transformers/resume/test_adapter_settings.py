"""Adapters go on with the scale that they were trained with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.errors import ConflictError
from safepoint.training.integrations.transformers.resume.loaded_model import check_adapter_settings

peft = pytest.importorskip("peft")


def adapted(name: str = "default", **settings: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 8, "target_modules": ["0"], **settings})
    return peft.PeftModel(model, config, name)


@pytest.mark.parametrize("name", ["default", "other"])
@pytest.mark.parametrize("settings", [{}, {"alpha_pattern": {"0": 4}}, {"use_dora": True}])
def test_the_same_settings_go_on(settings: dict[str, Any], name: str, tmp_path: Path) -> None:
    """Also with another dropout, which scales nothing, and in a checkpoint that names no settings."""
    check_adapter_settings(adapted(name), tmp_path, step=3)
    adapted(name, **settings).save_pretrained(tmp_path)
    check_adapter_settings(adapted(name, **settings), tmp_path, step=3)
    check_adapter_settings(adapted(name, **settings, lora_dropout=0.5), tmp_path, step=3)
    check_adapter_settings(torch.nn.Linear(2, 2), tmp_path, step=3)


@pytest.mark.parametrize("name", ["default", "other"])
@pytest.mark.parametrize(
    "changed", [{"lora_alpha": 16}, {"use_rslora": True}, {"use_dora": True}, {"alpha_pattern": {"0": 4}}]
)
def test_another_scale_is_refused(changed: dict[str, Any], name: str, tmp_path: Path) -> None:
    """In both directions, with the setting and both values."""
    for before, after in (({}, changed), (changed, {})):
        folder = tmp_path / str(len(before))
        adapted(name, **before).save_pretrained(folder)
        with pytest.raises(ConflictError, match=rf"step 3, the adapter '{name}' has {next(iter(changed))}="):
            check_adapter_settings(adapted(name, **after), folder, step=3)


def test_another_kind_is_refused(tmp_path: Path) -> None:
    """By its name."""
    adapted().save_pretrained(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    other = peft.PeftModel(model, peft.LoHaConfig(r=2, alpha=8, target_modules=["0"]))
    with pytest.raises(ConflictError, match="peft_type=LORA; in this run it has peft_type=LOHA"):
        check_adapter_settings(other, tmp_path, step=3)
