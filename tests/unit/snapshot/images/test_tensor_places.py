"""What is noticed of tensors that stay the same objects, by torch's own comparison and by the one that stands in."""

from collections.abc import Callable

import pytest
import torch

from safepoint.snapshot.images import module_state
from safepoint.snapshot.images.module_state import TensorPlaces


@pytest.fixture(params=["torch", "lists"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "lists":
        monkeypatch.setattr(module_state, "_guard_of_torch", lambda _tensors: None)
    else:
        assert module_state._guard_of_torch([torch.ones(2)]) is not None


def _set(tensor: torch.Tensor, other: torch.Tensor) -> None:
    tensor.data = other


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "another place": lambda tensor: _set(tensor, tensor.data.clone()),
    "transposed": lambda tensor: _set(tensor, tensor.data.t()),
    "transposed in place": lambda tensor: tensor.t_(),
    "another shape": lambda tensor: _set(tensor, tensor.data.view(8, 2)),
    "one dimension more": lambda tensor: _set(tensor, tensor.data.unsqueeze(0)),
    "a part of it": lambda tensor: _set(tensor, tensor.data[:2]),
    "other numbers": lambda tensor: _set(tensor, tensor.data.view(torch.int32)),
    "without gradients": lambda tensor: tensor.requires_grad_(not tensor.requires_grad),
}


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("change", list(CHANGES))
def test_changes_are_noticed(change: str) -> None:
    """Of one tensor among others, which are parameters, plain, empty, and no tensors."""
    changing = torch.arange(16.0).view(4, 4)
    values = [torch.nn.Parameter(torch.ones(3)), 7, torch.zeros(0), None, torch.tensor(1.0), changing]
    places = TensorPlaces(values)
    assert places.hold()
    changing.add_(1.0)
    assert places.hold()
    CHANGES[change](changing)
    assert not places.hold()


@pytest.mark.usefixtures("_way")
def test_the_mode_of_autograd_does_not_matter() -> None:
    """Saves come from anywhere."""
    places = TensorPlaces([torch.nn.Parameter(torch.ones(3)), torch.ones(2)])
    with torch.no_grad():
        assert places.hold()


@pytest.mark.usefixtures("_way")
def test_nothing_to_look_at() -> None:
    """No tensor: nothing can change."""
    assert TensorPlaces([]).hold()
    assert TensorPlaces([1, "a"]).hold()
