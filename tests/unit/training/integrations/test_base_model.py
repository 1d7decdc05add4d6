"""What a checkpoint of adapters says of the model below them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from holdfast.errors import ConflictError
from holdfast.training.integrations.transformers.base_model import base_of, check_base


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs))


def adapted(change: Callable[[Layers], None] = lambda _: None, *, seed: int = 0, rank: int = 2) -> Any:
    model = Layers()
    with torch.no_grad():
        change(model)
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=rank, target_modules=["first"]))


def test_a_model_without_adapters_has_no_base() -> None:
    """It is in the checkpoint itself."""
    assert base_of(Layers(), num_ranks=1) is None


def test_the_same_weights_are_the_same_base() -> None:
    """Whatever the adapters are, and however far they have been trained."""
    base = base_of(adapted(), num_ranks=1)
    assert base == base_of(adapted(seed=5, rank=3), num_ranks=2)
    check_base(base, base, step=3)


CHANGES: dict[str, Callable[[Layers], None]] = {
    "one bit": lambda model: model.second.weight.view(-1)[7].add_(1e-6),
    "another type": lambda model: model.second.to(torch.bfloat16),  # type: ignore[return-value]
    "two weights exchanged": lambda model: model.first.bias[:2].copy_(model.first.bias[:2].flip(0)),
    "below the adapters": lambda model: model.first.weight[0, 0].mul_(2),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_other_weights_are_refused(change: str) -> None:
    """With both called by their names."""
    saved, now = base_of(adapted(), num_ranks=1), base_of(adapted(CHANGES[change]), num_ranks=1)
    assert saved is not None
    with pytest.raises(ConflictError, match="the weights differ; training was not started"):
        check_base({**saved, "name": "acme/base", "revision": "0123456789abcdef"}, now, step=3)


def test_adapters_and_whole_models_are_not_exchanged() -> None:
    """In either direction."""
    base = base_of(adapted(), num_ranks=1)
    with pytest.raises(ConflictError, match="the checkpoint of step 3 holds adapters, this run trains the whole"):
        check_base(base, None, step=3)
    with pytest.raises(ConflictError, match="this run trains adapters, the checkpoint of step 3 has none"):
        check_base(None, base, step=3)
    check_base(None, None, step=3)
