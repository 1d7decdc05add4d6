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
        (_ADAM, {}, setting(betas=(1.0, 1.0))),
        (_ADAM, {}, setting(betas=(0.9, None))),
        (_ADAM, {}, setting(betas=(1e308, 1e308))),
        (_ADAM, {}, entry("step", lambda _: torch.tensor(-2.0))),
        (_ADAM, {}, entry("step", lambda _: torch.tensor(127, dtype=torch.int8))),
        (_ADAM, {}, without("exp_avg")),
        (_ADAM, {}, entry("exp_avg", lambda _: None)),
        (_ADAM, {}, entry("exp_avg", lambda _: [1, 2])),
        (_ADAM, {}, entry("exp_avg", lambda value: value.reshape(-1))),
        (_SGD, {"momentum": 0.9}, setting(momentum=None)),
        (_SGD, {"momentum": 0.9}, entry("momentum_buffer", lambda _: 7)),
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
        (_ADAM, {"amsgrad": True}),
        (_ADAM, {"eps": None}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Rprop, {"etas": (None, None)}),
        (torch.optim.ASGD, {"t0": None}),
        (torch.optim.ASGD, {"alpha": 1e30, "lambd": 1e30}),
        (torch.optim.Adafactor, {"eps": (1e30, 1e30), "d": 1e30, "beta2_decay": 9.0}),
        (torch.optim.LBFGS, {"max_iter": 10**15, "max_eval": 10**15, "tolerance_grad": -1, "tolerance_change": -1}),
        (torch.optim.LBFGS, {"history_size": 10**15, "line_search_fn": "x"}),
    ],
)
def test_settings_of_the_script_stay(kind: Any, settings: dict[str, Any]) -> None:
    """With these values, a step would fail, would make all weights infinite or NaN, or would take years."""
    optimizer = trained_by_closure() if kind is torch.optim.LBFGS else trained(kind)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= {**settings, "lr": 0.5}
    own = {name: optimizer.param_groups[0][name] for name in settings}
    with checked_optimizers("optimizer.pt", optimizer):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert {name: optimizer.param_groups[0][name] for name in settings} == own


def test_coefficients_of_muon() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.Muon([weight], lr=0.01)
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= {"ns_coefficients": (1e30, 1e30, 1e30), "ns_steps": 99, "adjust_lr_fn": "x"}
    with checked_optimizers("optimizer.pt", optimizer):
        optimizer.load_state_dict(saved)
    optimizer.step()
    assert weight.isfinite().all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_iter", "x"), ("n_iter", 10**400), ("func_evals", None), ("d", torch.ones(2)), ("d", None),
        ("prev_flat_grad", torch.empty(3, device="meta")), ("prev_flat_grad", [1.0]), ("old_dirs", [torch.ones(2)]),
        ("old_dirs", [torch.ones(3)] * 101), ("old_stps", "x"), ("old_stps", [5]), ("old_stps", []), ("ro", None),
        ("ro", [torch.ones(2)]), ("H_diag", torch.ones(3)), ("H_diag", torch.empty((), device="meta")), ("t", "x"),
        ("prev_loss", [1]),
    ],
)  # fmt: skip
def test_the_state_of_lbfgs(name: str, value: Any) -> None:
    optimizer = trained_by_closure()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0][name] = value
    with pytest.raises(CheckpointError, match="was not loaded"), checked_optimizers("optimizer.pt", optimizer):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("value", [[], [None], "x", 7])
def test_scratch_memory_of_lbfgs(value: Any) -> None:
    """A list that is too short would raise an error in a later step."""
    optimizer = trained_by_closure()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["al"] = value
    with checked_optimizers("optimizer.pt", optimizer):
        optimizer.load_state_dict(saved)
    weight = optimizer.param_groups[0]["params"][0]
    assert optimizer.state[weight]["al"] == [None] * 100


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_of_several_parameters(line_search: str | None) -> None:
    """A state of several steps is loaded, and the trial changes no parameter."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(2, dtype=torch.complex64))]
    optimizer = torch.optim.LBFGS(weights, max_iter=3, line_search_fn=line_search)

    def loss() -> Any:
        optimizer.zero_grad()
        value = sum((one.abs() ** 4).sum() for one in weights)
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(loss)
    before, saved = [one.detach().clone() for one in weights], copy.deepcopy(optimizer.state_dict())
    with checked_optimizers("optimizer.pt", optimizer):
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert all(torch.equal(one, other) for one, other in zip(before, weights, strict=True))
    assert repr(optimizer.state_dict()) == repr(saved)
    optimizer.step(loss)


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
