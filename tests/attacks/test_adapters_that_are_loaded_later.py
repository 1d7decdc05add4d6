"""Adapters that a callback adds when training begins: their weights are read after all other files of a checkpoint.

torch's own restriction lets a pickle make a tensor of freed memory of the process. The next checkpoint would contain
this memory, with whatever secrets were in it.
"""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from safepoint.errors import CheckpointError
from safepoint.training.integrations.transformers.resume.loaded_model import load_later_adapters
from tests.attacks.test_calls_of_pickles import write
from tests.support.pickles import call, name, number, text

_WEIGHT = "base_model.model.lora_A.weight"


@pytest.mark.parametrize("adapter", ["default", "teacher"])
@pytest.mark.parametrize("kind", ["freed memory", "the older format"])
def test_weights(adapter: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path if adapter == "default" else tmp_path / adapter
    folder.mkdir(exist_ok=True)
    path = folder / "adapter_model.bin"
    if kind == "freed memory":
        tensor = call(name("torch", "FloatTensor"), number(20_000))
        write(path, pickle.EMPTY_DICT + text(_WEIGHT) + tensor + pickle.SETITEM)
    else:
        torch.save({_WEIGHT: torch.zeros(2)}, path, _use_new_zipfile_serialization=False)
    model: Any = SimpleNamespace(peft_config={adapter: None})
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin was not loaded"):
        load_later_adapters(model, (), tmp_path, step=4)


def test_what_peft_saves(tmp_path: Path) -> None:
    def make() -> Any:
        base = torch.nn.Sequential(torch.nn.Linear(4, 4))
        return get_peft_model(base, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))  # pyright: ignore

    before, after = make(), make()
    before.save_pretrained(tmp_path, safe_serialization=False)
    assert (tmp_path / "adapter_model.bin").is_file()
    load_later_adapters(after, (), tmp_path, step=4)
    for key, weight in before.state_dict().items():
        if "lora" in key:
            assert torch.equal(after.state_dict()[key], weight)
