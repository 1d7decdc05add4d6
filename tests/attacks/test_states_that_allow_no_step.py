"""States of optimizers that are loaded without an error, and with which the first step would raise one.

The run would end in its first step, in each start, with an error of torch that names no file.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.checkpoint.pickles.optimizer_states import checked_optimizers
from safepoint.errors import CheckpointError

_ADAM, _SGD = torch.optim.AdamW, torch.optim.SGD


def trained(kind: Any, **settings: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((4, 3), (3,), (5, 4))]
    optimizer = kind(parameters, **{"lr": 0.1, **settings})
    for _ in range(2):
        for one in parameters:
            one.grad = torch.randn_like(one)
        optimizer.step()
    return optimizer


def setting(**values: Any) -> Callable[[Any], None]:
    return lambda state: state["param_groups"][0].update(values)


def entry(name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def replace(state: Any) -> None:
        for one in state["state"].values():
            one[name] = change(one[name])

    return replace


def without(name: str) -> Callable[[Any], None]:
    return lambda state: [one.pop(name) for one in state["state"].values()] and None


@pytest.mark.parametrize(
    ("kind", "settings", "change"),
    [
        (_ADAM, {}, setting(lr=None)),
        (_ADAM, {}, setting(lr=torch.empty((), device="meta"))),
        (_ADAM, {}, setting(lr=torch.tensor(1j))),
        (_ADAM, {}, setting(lr=torch.tensor(float("nan")))),
        (_ADAM, {}, setting(amsgrad=True)),
        (_ADAM, {}, setting(betas=(1.0, 1.0))),
        (_ADAM, {}, setting(betas=(0.9, None))),
        (_ADAM, {}, setting(betas=(1e308, 1e308))),
        (_ADAM, {}, setting(eps=None)),
        (_ADAM, {}, entry("step", lambda _: torch.tensor(-2.0))),
        (_ADAM, {}, entry("step", lambda _: torch.tensor(127, dtype=torch.int8))),
        (_ADAM, {}, without("exp_avg")),
        (_ADAM, {}, entry("exp_avg", lambda _: None)),
        (_ADAM, {}, entry("exp_avg", lambda _: [1, 2])),
        (_ADAM, {}, entry("exp_avg", lambda value: value.reshape(-1))),
        (_SGD, {"momentum": 0.9}, setting(momentum=None)),
        (_SGD, {"momentum": 0.9}, entry("momentum_buffer", lambda _: 7)),
        (torch.optim.RMSprop, {}, setting(centered=True)),
        (torch.optim.Rprop, {}, setting(etas=(None, None))),
        (torch.optim.ASGD, {}, setting(t0=None)),
    ],
)
def test_it_is_refused_when_it_is_loaded(
    kind: Any, settings: dict[str, Any], change: Callable[[Any], None], tmp_path: Path
) -> None:
    """The message names the file, and the optimizer has its earlier state again."""
    saved = copy.deepcopy(trained(kind, **settings).state_dict())
    change(saved)
    optimizer = trained(kind, **settings)
    before = copy.deepcopy(optimizer.state_dict())
    path = tmp_path / "optimizer.pt"
    with pytest.raises(CheckpointError, match=r"optimizer\.pt was not loaded"), checked_optimizers(path, optimizer):
        optimizer.load_state_dict(saved)
    assert repr(optimizer.state_dict()) == repr(before)
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (_ADAM, {}),
        (_ADAM, {"amsgrad": True, "foreach": True}),
        (_ADAM, {"fused": True}),
        (_ADAM, {"lr": torch.tensor(0.1)}),
        (_SGD, {}),
        (_SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.Rprop, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.LBFGS, {}),
    ],
)
def test_what_an_optimizer_has_saved_is_loaded(kind: Any, settings: dict[str, Any]) -> None:
    """And neither the parameters nor the random numbers change."""
    if kind is torch.optim.LBFGS:
        saved, optimizer = trained_by_closure().state_dict(), trained_by_closure()
    else:
        saved, optimizer = trained(kind, **settings).state_dict(), trained(kind, **settings)
    parameters = [one.detach().clone() for group in optimizer.param_groups for one in group["params"]]
    random = torch.get_rng_state()
    expected = copy.deepcopy(saved)
    with checked_optimizers("optimizer.pt", optimizer):
        optimizer.load_state_dict(saved)
    assert torch.equal(torch.get_rng_state(), random)
    now = [one for group in optimizer.param_groups for one in group["params"]]
    assert all(torch.equal(one, other) for one, other in zip(parameters, now, strict=True))
    assert repr(optimizer.state_dict()) == repr(expected)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "settings", "name", "value"),
    [
        (_ADAM, {}, "exp_avg", None),
        (_ADAM, {}, "exp_avg", [1]),
        (_ADAM, {}, "step", torch.tensor(-2.0)),
        (_ADAM, {}, "step", torch.tensor(127, dtype=torch.int8)),
        (_SGD, {"momentum": 0.9}, "momentum_buffer", 7),
        (torch.optim.NAdam, {}, "mu_product", None),
    ],
)
def test_the_state_of_one_parameter(kind: Any, settings: dict[str, Any], name: str, value: Any, number: int) -> None:
    """It is found whichever parameter it is, and not only in the smallest one."""
    optimizer = trained(kind, **settings)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][number][name] = value
    with pytest.raises(CheckpointError, match="was not loaded"), checked_optimizers("optimizer.pt", optimizer):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("name", ["exp_avg", "step"])
def test_the_state_of_large_parameters(name: str) -> None:
    """One element is tried, because a copy of the whole would need much memory."""
    weight = torch.nn.Parameter(torch.zeros(1100, 1000))
    weight.grad = torch.ones_like(weight)
    optimizer = _ADAM([weight], lr=0.1)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    with checked_optimizers("optimizer.pt", optimizer):
        optimizer.load_state_dict(copy.deepcopy(saved))
    saved["state"][0][name] = None
    with pytest.raises(CheckpointError, match="was not loaded"), checked_optimizers("optimizer.pt", optimizer):
        optimizer.load_state_dict(saved)


def test_parameters_without_momentum() -> None:
    """Those that have had no gradient yet have none, or None."""
    optimizer = trained(_SGD, momentum=0.9)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["momentum_buffer"] = None
    del saved["state"][2]
    with checked_optimizers("optimizer.pt", optimizer):
        optimizer.load_state_dict(saved)


def trained_by_closure() -> torch.optim.Optimizer:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3))
    optimizer = torch.optim.LBFGS([weight])

    def loss() -> Any:
        optimizer.zero_grad()
        value = (weight**2).sum()
        value.backward()
        return value

    optimizer.step(loss)
    return optimizer
