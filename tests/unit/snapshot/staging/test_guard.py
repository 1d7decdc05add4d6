"""The moment before an optimizer changes anything, with closures and without."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from safepoint.snapshot.staging.guard import before_changes


class Watched:
    """One parameter, and what happened to it."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(3))
        self.heard: list[str] = []

    def closure(self) -> torch.Tensor:
        self.heard.append("forward")
        self.parameter.grad = torch.ones(3)
        return self.parameter.sum()


@pytest.fixture
def watched() -> Iterator[Watched]:
    one = Watched()

    def call(_: torch.optim.Optimizer) -> None:
        one.heard.append("changed before" if (one.parameter != 1).any() else "in time")

    handle = before_changes(call)
    yield one
    handle.remove()


@pytest.mark.parametrize("give", [lambda step, closure: step(closure), lambda step, closure: step(closure=closure)])
def test_a_closure_runs_first(watched: Watched, give: Callable[[Any, Any], Any]) -> None:
    """Forward and backward are beside the copy; the parameters are as they were."""
    optimizer = torch.optim.AdamW([watched.parameter])
    loss = give(optimizer.step, watched.closure)
    assert watched.heard == ["forward", "in time"]
    assert loss == 3
    assert (watched.parameter != 1).all()


def test_without_a_closure(watched: Watched) -> None:
    """The step begins with it."""
    watched.closure()
    torch.optim.SGD([watched.parameter], lr=0.1).step()
    assert watched.heard == ["forward", "in time"]


def test_an_optimizer_that_calls_the_closure_again(watched: Watched) -> None:
    """Each call is before a change; the first one before all of them."""
    torch.optim.LBFGS([watched.parameter], max_iter=3).step(watched.closure)
    assert watched.heard[:2] == ["forward", "in time"]


def test_an_optimizer_that_changes_before_its_closure(watched: Watched) -> None:
    """Of optimizers that are not torch's nothing is known: they are waited for when the step begins."""

    class Early(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            watched.parameter.data += 1
            return super().step(closure)

    Early([watched.parameter], lr=0.1).step(watched.closure)
    assert watched.heard[0] == "in time"


def test_it_ends(watched: Watched) -> None:
    """After `remove` no hook is called."""
    called: list[Any] = []
    before_changes(called.append).remove()
    watched.closure()
    torch.optim.SGD([watched.parameter], lr=0.1).step()
    assert not called
