"""A session's parts through their files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from safepoint.errors import ConflictError
from safepoint.foundation.environment import Place
from safepoint.training.collective.peers import Peers
from safepoint.training.plain.state import parts as parts_module
from safepoint.training.plain.state.parts import NamedParts
from safepoint.training.state.plain_values import load_plain


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


def test_a_checkpoint_with_other_parts_contradicts_the_script(tmp_path: Path) -> None:
    before = named(1)
    NamedParts({"model": before["model"]}, Place()).write(tmp_path)
    with pytest.raises(ConflictError, match=r"has no optimizer.*; training was not started"):
        NamedParts(named(2), Place()).load(tmp_path)


def adapted(seed: int, *, base: int = 3, rank: int = 2) -> dict[str, Any]:
    torch.manual_seed(base)
    layers = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 3))
    torch.manual_seed(seed)
    model: Any = get_peft_model(layers, LoraConfig(r=rank, target_modules=["0"]))
    model(torch.randn(8, 30)).sum().backward()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def of_session(parts: dict[str, Any]) -> tuple[NamedParts, Any]:
    found = NamedParts(parts, Place())
    return found, found.base(Peers(Place(), timeout_s=1))


def test_adapters_are_written_without_what_is_below_them(tmp_path: Path) -> None:
    """With it they are the whole model again, statistics of the frozen part included."""
    before, after = adapted(1), adapted(2)
    (writer, base), (reader, again) = of_session(before), of_session(after)
    assert base == again
    assert base is not None
    writer.write(tmp_path)
    held = load_plain(tmp_path / "model.pt")
    assert not any("base_layer" in key or key.endswith("model.2.weight") for key in held)
    reader.load(tmp_path)
    state = after["model"].state_dict()
    for name, tensor in before["model"].state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_adapters_of_another_shape_are_refused(tmp_path: Path) -> None:
    """Before anything of them is loaded."""
    writer, _ = of_session(adapted(1))
    writer.write(tmp_path)
    other, _ = of_session(adapted(2, rank=3))
    with pytest.raises(
        ConflictError, match=r"lora_A.default.weight is \(2, 30\) in the checkpoint and \(3, 30\) in the script"
    ):
        other.load(tmp_path)


def test_the_final_adapters_are_read_by_peft(tmp_path: Path) -> None:
    """On the model that they were trained on."""
    parts = adapted(1)
    writer, _ = of_session(parts)
    writer.write_final(tmp_path)
    torch.manual_seed(3)
    layers = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 3))
    read = PeftModel.from_pretrained(layers, str(tmp_path))
    inputs = torch.randn(4, 30)
    layers[1].load_state_dict(parts["model"].base_model.model[1].state_dict())  # PEFT does not save statistics
    assert torch.equal(read.eval()(inputs), parts["model"].eval()(inputs))


def test_several_models_with_adapters(tmp_path: Path) -> None:
    """Each without its base; all bases count."""
    first, second = adapted(1), adapted(2, base=4)
    parts, base = of_session({"actor": first["model"], "critic": second["model"], "optimizer": first["optimizer"]})
    assert base is not None
    _, exchanged = of_session({"actor": second["model"], "critic": first["model"], "optimizer": first["optimizer"]})
    assert exchanged["digest"] != base["digest"]
    parts.write(tmp_path)
    assert not any("base_layer" in key for name in ("actor", "critic") for key in load_plain(tmp_path / f"{name}.pt"))


@pytest.mark.parametrize(
    ("make", "difference"),
    [
        (
            lambda model: torch.optim.SGD(model.parameters()),
            "it has 'amsgrad' in the checkpoint and 'dampening' in the script",
        ),
        (
            lambda model: torch.optim.AdamW([model.weight]),
            r"it has groups of \[2\] parameters in the checkpoint and of \[1\] in the script",
        ),
    ],
)
def test_another_optimizer_is_refused(make: Any, difference: str, tmp_path: Path) -> None:
    """With what is different."""
    NamedParts(named(1), Place()).write(tmp_path)
    model = torch.nn.Linear(300, 30)
    with pytest.raises(ConflictError, match=f"optimizer of .* differs from this script's: {difference}"):
        NamedParts({"model": model, "optimizer": make(model)}, Place()).load(tmp_path)
