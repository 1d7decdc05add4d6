"""Optimizer states whose tensors do not fit the parameters: torch's fused kernels would read and write other memory.

The files contain nothing but plain data, and their digests are right.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.checkpoint.pickles.optimizer_states import checked_optimizers
from safepoint.errors import CheckpointError, ExitCode
from safepoint.foundation.environment import Place
from safepoint.snapshot.checkpointer import load_state
from safepoint.training.integrations.deepspeed.loading import load_universal
from safepoint.training.integrations.deepspeed.partitions import Partitions
from safepoint.training.integrations.deepspeed.universal import Universal
from safepoint.training.plain.state.parts import NamedParts
from safepoint.training.state.data_only import only_data
from tests.support.checkpoints import reseal
from tests.support.jobs import TINY, Job, no_orphans, safepoint
from tests.support.zero import random_states, write_zero

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": lambda weights: torch.optim.AdamW(weights, fused=True, amsgrad=True),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
}


def _stepped(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 8))
    optimizer = make(module.parameters())
    _step(module, optimizer)
    return module, optimizer


def _step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    @torch.enable_grad()
    def closure() -> Any:
        optimizer.zero_grad()
        loss = module(torch.ones(4, 32)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def _gaps(one: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*one.shape, 2)[..., 0]


def _overlapping(one: torch.Tensor) -> torch.Tensor:
    return torch.zeros(one.numel()).as_strided(one.shape, [1] * one.dim())


_HOSTILE: dict[str, Callable[[torch.Tensor], Any]] = {
    "one element": lambda one: torch.zeros(1),
    "no element": lambda one: torch.zeros(0),
    "half": lambda one: torch.zeros(one.numel() // 2),
    "one too few": lambda one: torch.zeros(one.numel() - 1),
    "more": lambda one: torch.zeros(one.numel() * 2),
    "expanded": lambda one: torch.zeros(1).expand(one.shape),
    "expanded over rows": lambda one: (
        torch.zeros(one.shape[-1]).expand(one.shape) if one.dim() > 1 else torch.zeros(1)
    ),
    "gaps": _gaps,
    "overlapping": lambda one: _overlapping(one) if one.dim() > 1 else torch.zeros(1),
    "no memory": lambda one: torch.zeros(one.shape, device="meta"),
    "a list": lambda one: [torch.zeros(1)],
}


def _into_checkpointer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    load_state(path.parent, {"optimizer": optimizer})


def _into_session(path: Path, optimizer: torch.optim.Optimizer) -> None:
    place = Place.from_environment({})
    NamedParts({"optimizer": optimizer}, place).load(path.parent)


def _by_framework(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """As the Trainer and Accelerate do it."""
    with only_data(path.parent):
        optimizer.load_state_dict(torch.load(path, weights_only=True))


def _by_wrapper(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """As a part of a session that is not an optimizer, but has one."""

    class Part:
        def state_dict(self) -> dict[str, Any]:
            return optimizer.state_dict()

        def load_state_dict(self, state: Any) -> None:
            optimizer.load_state_dict(state)

    load_state(path.parent, {"optimizer": Part()})


_WAYS = [_into_checkpointer, _into_session, _by_framework, _by_wrapper]


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("hostile", _HOSTILE)
@pytest.mark.parametrize("kind", ["AdamW", "AdamW, fused", "SGD", "Adagrad"])
def test_tensors_that_do_not_fit(kind: str, hostile: str, way: Any, tmp_path: Path) -> None:
    """The error names the file and the tensor, and the optimizer keeps its state."""
    module, optimizer = _stepped(_OPTIMIZERS[kind])
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(before)
    state["param_groups"][0].update(fused=True, foreach=False)
    for of_parameter in state["state"].values():
        name = next(name for name in of_parameter if name != "step")
        of_parameter[name] = _HOSTILE[hostile](of_parameter[name])
    torch.save(state, tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt was not loaded"):
        way(tmp_path / "optimizer.pt", optimizer)
    after = optimizer.state_dict()
    torch.testing.assert_close(after["state"], before["state"])
    assert after["param_groups"] == before["param_groups"]
    _step(module, optimizer)


@pytest.mark.parametrize(
    "step", [torch.zeros(0), torch.zeros(2), torch.zeros(1).expand(7), torch.zeros((), device="meta")]
)
def test_steps_that_do_not_fit(step: torch.Tensor, tmp_path: Path) -> None:
    _, optimizer = _stepped(_OPTIMIZERS["AdamW, fused"])
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["step"] = step
    torch.save(state, tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"'step' of its optimizer|was not loaded"):
        _into_checkpointer(tmp_path / "optimizer.pt", optimizer)


@pytest.mark.parametrize("key", ["x", 99, -1, None, (1, 2)])
def test_states_of_no_parameter(key: Any) -> None:
    """The optimizer would keep them for ever, and write them into each checkpoint."""
    _, optimizer = _stepped(torch.optim.AdamW)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][key] = {"exp_avg": torch.ones(2)}
    before = set(optimizer.state)
    with pytest.raises(CheckpointError, match="its optimizer has no parameter"), checked_optimizers("a", optimizer):
        optimizer.load_state_dict(state)
    assert set(optimizer.state) == before


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_how_a_step_is_computed_stays_as_the_script_says(kind: str, way: Any, tmp_path: Path) -> None:
    _, optimizer = _stepped(_OPTIMIZERS[kind])
    names = ("fused", "foreach", "capturable", "differentiable", "maximize")
    own = {name: optimizer.param_groups[0][name] for name in names if name in optimizer.param_groups[0]}
    state = copy.deepcopy(optimizer.state_dict())
    changed = {name: not own.get(name) for name in (own if way is _into_session else names)}
    state["param_groups"][0].update(changed, lr=0.5)
    torch.save(state, tmp_path / "optimizer.pt")
    way(tmp_path / "optimizer.pt", optimizer)
    group = optimizer.param_groups[0]
    assert {name: group[name] for name in names if name in group} == own
    assert group["lr"] == 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", "abc"), ("lr", torch.zeros(0)), ("lr", torch.zeros(5)), ("lr", float("nan")), ("lr", [1]),
        ("betas", (2.0, "x")), ("betas", (0.9,)), ("betas", 5), ("eps", {"a": 1}), ("weight_decay", "x"),
    ],
)  # fmt: skip
def test_settings_of_another_kind(name: str, value: Any, tmp_path: Path) -> None:
    _, optimizer = _stepped(_OPTIMIZERS["AdamW"])
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][name] = value
    torch.save(state, tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=f"the setting '{name}' of its optimizer"):
        _into_session(tmp_path / "optimizer.pt", optimizer)


# ---- states that optimizers create themselves --------------------------------------------------------------------


class _Factored(torch.optim.Optimizer):
    """An optimizer of a script, with states of its own: a list, a preconditioner, a single number."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # pyright: ignore
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state.update(exp_avg_sq=torch.zeros(()), count=0, history=[])
                    state["left"] = torch.eye(weight.shape[0])
                state["count"] += 1
                state["history"].append(torch.ones(state["count"]))
                weight.data.sub_(weight.grad, alpha=group["lr"])


class _Quantized(torch.optim.Optimizer):
    """As the optimizers of bitsandbytes: it loads its states itself, and its kernels read blocks of them."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.1})
        self.index: list[tuple[int, int]] = []

    def init_state(self, group: Any, p: torch.Tensor, gindex: int, pindex: int) -> None:
        self.index.append((gindex, pindex))
        blocks = -(-p.numel() // 256)
        self.state[p].update(
            step=0, state1=torch.zeros_like(p, dtype=torch.uint8), qmap1=torch.zeros(256), absmax1=torch.zeros(blocks)
        )

    def step(self, closure: Any = None) -> None:  # pyright: ignore
        for group_index, group in enumerate(self.param_groups):
            for index, weight in enumerate(group["params"]):
                if not self.state[weight]:
                    self.init_state(group, weight, group_index, index)

    def load_state_dict(self, state_dict: Any) -> None:
        for weight, state in zip(self.param_groups[0]["params"], state_dict["state"].values(), strict=True):
            self.state[weight] = state


_THEIR_OWN = {
    **_OPTIMIZERS,
    "LBFGS": torch.optim.LBFGS,
    "Adafactor of transformers": lambda weights: pytest.importorskip("transformers").Adafactor(weights, beta1=0.9),
    "of a script": _Factored,
    "quantized": _Quantized,
    "Muon": lambda weights: torch.optim.Muon([one for one in weights if one.dim() == 2]),
    "lr is a tensor": lambda weights: torch.optim.AdamW(weights, lr=torch.tensor(0.1), foreach=False),
}  # fmt: skip


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("kind", _THEIR_OWN)
def test_states_of_optimizers(kind: str, way: Any, tmp_path: Path) -> None:
    """What an optimizer has saved is loaded, nothing else changes, and the next step has the same result."""
    module, optimizer = _stepped(_THEIR_OWN[kind])
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    twin, fresh = copy.deepcopy(module), None
    fresh = _THEIR_OWN[kind](twin.parameters())
    generator = torch.random.get_rng_state()
    way(tmp_path / "optimizer.pt", fresh)
    assert torch.equal(torch.random.get_rng_state(), generator)
    torch.testing.assert_close(fresh.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    groups = [one.state_dict()["param_groups"][0] for one in (fresh, optimizer)]
    assert list(groups[0]) == list(groups[1])  # so the next checkpoint has the same bytes
    for _ in range(2):
        _step(module, optimizer)
        _step(twin, fresh)
    torch.testing.assert_close(twin.state_dict(), module.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("absmax1", torch.zeros(1)), ("absmax1", torch.zeros(2, dtype=torch.uint8)), ("qmap1", torch.zeros(255)),
        ("state1", torch.zeros(16, 32, dtype=torch.int64)),
        ("state1", torch.zeros((), dtype=torch.uint8).expand(16, 32)),
        ("state2", torch.zeros(16, 32, dtype=torch.uint8)),
    ],
)  # fmt: skip
def test_states_of_quantized_optimizers(name: str, value: torch.Tensor, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(16, 32))
    optimizer = _Quantized([weight])
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0][name] = value
    optimizer = _Quantized([weight])
    with pytest.raises(CheckpointError, match=f"a was not loaded: '{name}'"), checked_optimizers("a", optimizer):
        optimizer.load_state_dict(state)
    assert not optimizer.state
    assert optimizer.index == []


@pytest.mark.parametrize("name", ["row_var", "col_var"])
def test_factored_states(name: str, tmp_path: Path) -> None:
    _, optimizer = _stepped(_OPTIMIZERS["Adafactor"])
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0][name] = torch.zeros(3, 1)
    torch.save(state, tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=f"'{name}' of its optimizer"):
        _into_checkpointer(tmp_path / "optimizer.pt", optimizer)


# ---- whole runs --------------------------------------------------------------------------------------------------

_LIGHTNING = TINY.parent / "lightning_loop.py"
_LOOP = TINY.parent / "loop.py"


@pytest.mark.parametrize(
    ("name", "command", "file"),
    [
        ("trainer", [str(TINY), "--max-steps", "{}", "--samples", "64"], "optimizer.pt"),
        ("session", [str(_LOOP), "--epochs", "{}", "--step-ms", "1"], "optimizer.pt"),
        ("accelerate", [str(_LOOP), "--epochs", "{}", "--step-ms", "1", "--accelerate"], "optimizer.bin"),
        ("lightning", [str(_LIGHTNING), "--max-steps", "{}"], "lightning.ckpt"),
    ],
)
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_runs(name: str, command: list[str], file: str, tmp_path: Path) -> None:
    """A run ends with exit code 14, and names the file and the tensor."""
    if name in {"lightning", "accelerate"}:
        pytest.importorskip(name)
    output = tmp_path / "run"
    counts = ("1", "2") if "--epochs" in command else ("4", "8")

    def start(count: str) -> Job:
        words = [word.format(count) for word in command]
        program = [words[0], "--out", str(output), *words[1:]]
        return safepoint(
            output, "--max-restarts", "0", "--save-strategy", "steps", "--save-steps", "2", program=program
        )

    job = start(counts[0])
    with no_orphans(job):
        assert job.wait() == ExitCode.OK, job.text
    newest = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    content = torch.load(newest / file, weights_only=True)
    state = content["optimizer_states"][0] if name == "lightning" else content
    state["param_groups"][0].update(fused=True, foreach=False)
    for of_parameter in state["state"].values():
        of_parameter["exp_avg"] = torch.zeros(1)
    torch.save(content, newest / file)
    reseal(newest)
    job = start(counts[1])
    with no_orphans(job):
        assert job.wait() == ExitCode.NOTHING_VALID, job.text
    assert f"{newest.name}/{file} was not loaded: 'exp_avg' of its optimizer" in job.text


# ---- DeepSpeed with another number of ranks ---------------------------------------------------------------------


def _load_partitions(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of an optimizer that has loaded partitions whose groups have these settings."""
    for path in write_zero(folder / "saved", random_states(), stage=2, ranks=1).glob("*optim_states.pt"):
        content = torch.load(path, weights_only=False)
        for group in content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            group.update(settings)
        torch.save(content, path)
    partitions = Partitions(folder / "saved", ranks=1)
    Universal(partitions, folder / "copy", stage=2).write(0, 1)
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in partitions.param_groups]
    inner = torch.optim.Adam([{"params": [weight]} for weight in weights])
    zero = SimpleNamespace(pipeline_loading_checkpoint=False)
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(optimizer=inner),
        module=torch.nn.Linear(1, 1),
        _config=SimpleNamespace(load_universal_checkpoint=False, zero_config=zero),
        load_checkpoint=lambda *args: None,
    )
    load_universal(engine, folder / "copy", lambda: None)
    return inner.param_groups


def test_settings_of_partitions(tmp_path: Path) -> None:
    """DeepSpeed does not load them, so they are set afterwards."""
    own = torch.optim.Adam([torch.ones(1)]).param_groups[0]
    hostile = {"maximize": True, "fused": True, "differentiable": True, "capturable": True, "foreach": True}
    for group in _load_partitions(tmp_path, hostile):
        assert {name: group[name] for name in hostile} == {name: own[name] for name in hostile}
        assert group["lr"] == 0.25


@pytest.mark.parametrize("settings", [{"lr": "x"}, {"betas": 5}, {"lr": float("nan")}, {"weight_decay": [1]}])
def test_invalid_settings_of_partitions(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the setting"):
        _load_partitions(tmp_path, settings)
