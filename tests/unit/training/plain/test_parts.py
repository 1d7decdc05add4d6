"""A session's parts through their files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.foundation.environment import Place
from holdfast.training.plain import parts as parts_module
from holdfast.training.plain.loading import load_plain
from holdfast.training.plain.parts import NamedParts


def named(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(300, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_a_model_is_copied_out_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never in memory twice, and nothing refers to the file afterwards."""
    before, after = named(1), named(2)
    NamedParts(before, Place()).write(tmp_path)
    seen: list[tuple[str, bool]] = []

    def load(path: Path, **options: Any) -> Any:
        state = load_plain(path, **options)
        seen.append((path.name, is_mapped(path)))
        return state

    monkeypatch.setattr(parts_module, "load_plain", load)
    NamedParts(after, Place()).load(tmp_path)
    assert seen == [("model.pt", True), ("optimizer.pt", False)]
    assert not is_mapped(tmp_path / "model.pt")
    for name, tensor in before["model"].state_dict().items():
        assert torch.equal(after["model"].state_dict()[name], tensor)
    first = before["optimizer"].state_dict()["state"][0]["exp_avg"]
    assert torch.equal(after["optimizer"].state_dict()["state"][0]["exp_avg"], first)
