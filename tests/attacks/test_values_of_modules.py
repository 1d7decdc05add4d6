"""States of modules that load values with code of their own, such as metrics: values of another kind, and counts.

torch copies a loaded tensor, and compares its shape. A metric of torchmetrics makes an attribute from any value. The
run would end in its first steps, in each start, with an error that names no file.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch.optim.swa_utils import AveragedModel

from safepoint.checkpoint.pickles.module_states import checked_modules, unmapped
from safepoint.errors import CheckpointError, ExitCode
from safepoint.foundation.environment import Place
from safepoint.snapshot.checkpointer import load_state
from safepoint.training.plain.state.parts import NamedParts
from safepoint.training.state.data_only import only_data
from tests.support.checkpoints import reseal
from tests.support.jobs import Job, no_orphans, safepoint

_META = torch.empty((), device="meta")
with warnings.catch_warnings(action="ignore"):  # a future release of torch has no such tensors
    _QUANTIZED = torch.quantize_per_tensor(torch.tensor(1.0), 1.0, 0, torch.quint8)


class Joined(torchmetrics.Metric):
    """A metric of a script, with a list of tensors and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", default=[], dist_reduce_fx="cat", persistent=True)
        self.add_state("hits", default=torch.zeros(2), dist_reduce_fx="sum", persistent=True)
        self.add_state("found", default=[], dist_reduce_fx=None)
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum", persistent=True)

    def update(self, values: torch.Tensor) -> None:
        self.values.append(values)
        self.hits += 1
        self.count += values.numel()

    def compute(self) -> torch.Tensor:
        return torch.cat(self.values).sum() / self.count + self.hits.sum()


class Running(torch.nn.Module):
    """A module of a script, with attributes that it loads itself, and a method of its own or a hook for that."""

    def __init__(self, by_hook: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3))
        self.register_buffer("points", torch.zeros(4, 3))
        self.mean, self.rate, self.name = torch.zeros(3), 0.5, "a"
        self.cache: Any = torch.zeros(3)
        if by_hook:
            self.register_load_state_dict_pre_hook(self._take)

    def _take(self, module: Any, state: Any, prefix: str, *_: Any) -> None:
        for name in ("mean", "rate", "name", "cache"):
            if prefix + name in state:
                setattr(self, name, state.pop(prefix + name))
        if prefix + "points" in state:
            self.points = state[prefix + "points"]


class Loading(Running):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self._take(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _by_session(folder: Path, saved: Any, module: Any) -> None:
    torch.save(saved, folder / "model.pt")
    NamedParts({"model": module}, Place()).load(folder)


def _by_checkpointer(folder: Path, saved: Any, module: Any) -> None:
    torch.save(saved, folder / "model.pt")
    load_state(folder, {"model": module})


def _by_framework(folder: Path, saved: Any, module: Any) -> None:
    torch.save(saved, folder / "model.bin")
    with only_data(folder):
        module.load_state_dict(torch.load(folder / "model.bin"))


_LOADS = [_by_session, _by_checkpointer, _by_framework]


@pytest.mark.parametrize("load", _LOADS[1:])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("values", "abc"), ("values", {"append": 1}), ("values", ["a"]), ("values", [1.0]), ("values", None),
        ("values", torch.zeros(3)), ("values", [torch.zeros(3, 7, 2), torch.zeros(2)]), ("values", [_META]),
        ("values", [_QUANTIZED]), ("values", [[1]]), ("found", ["a"]), ("found", {}),
        ("hits", "x"), ("hits", {}), ("hits", None), ("hits", torch.zeros(3, 7)), ("hits", [1, "x"]),
        ("hits", torch.zeros(2, device="meta")), ("hits", torch.zeros(2).to_sparse()),
        ("hits", torch.zeros(2, dtype=int)), ("count", torch.tensor(1j)), ("count", _META), ("count", _QUANTIZED),
        ("count", torch.tensor(True)), ("count", 5),
    ],
)  # fmt: skip
def test_a_state_of_a_metric(load: Callable[..., None], name: str, value: Any, tmp_path: Path) -> None:
    """The message names the file and the state, and the metric can be used afterwards: Lightning moves it then."""
    metric = Joined()
    model = torch.nn.ModuleDict({"acc": metric})
    metric.update(torch.ones(4))
    saved = {**model.state_dict(), f"acc.{name}": value}
    with pytest.raises(
        CheckpointError, match=rf"model.* was not loaded: '{name}' of its Joined .*unlike in the script"
    ):
        load(tmp_path, saved, model)
    metric.cpu().update(torch.ones(4))
    assert metric.compute() == 1 + 4


def test_a_state_of_a_metric_in_a_session(tmp_path: Path) -> None:
    saved = {**Joined().state_dict(), "values": "abc"}
    with pytest.raises(
        CheckpointError, match=r"model.pt was not loaded: 'values' of its Joined is a value of type str"
    ):
        _by_session(tmp_path, saved, Joined())


@pytest.mark.parametrize("load", _LOADS)
def test_what_a_metric_saves(load: Callable[..., None], tmp_path: Path) -> None:
    """Lists may be longer than in the script, and a sum of whole numbers may have become a float."""
    metric, other = Joined(), Joined()
    for size in (3, 5):
        metric.update(torch.rand(size))
    metric.values.append(torch.tensor(2.0))
    metric.count = metric.count + 0.5
    load(tmp_path, metric.state_dict(), other)
    assert len(other.values) == 3
    assert other.count == 8.5
    assert torch.equal(other.hits, metric.hits)


@pytest.mark.parametrize("load", _LOADS[1:])
def test_a_metric_whose_states_grow(load: Callable[..., None], tmp_path: Path) -> None:
    """R2Score begins with one number, and has one for each output after its first update."""
    metric, other = torchmetrics.R2Score(multioutput="raw_values"), torchmetrics.R2Score(multioutput="raw_values")
    metric.persistent(True)
    other.persistent(True)
    metric.update(torch.rand(8, 3), torch.rand(8, 3))
    load(tmp_path, metric.state_dict(), other)
    assert torch.equal(other.residual, metric.residual)
    assert other.residual.shape == (3,)


@pytest.mark.parametrize("make", [Loading, lambda: Running(by_hook=True)])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mean", "x"), ("mean", 5), ("mean", torch.zeros(3, 7)), ("mean", torch.zeros(3).to_sparse()),
        ("mean", torch.zeros(3, device="meta")),
        ("mean", torch.zeros(3, dtype=torch.complex64)), ("rate", "x"), ("rate", [0.5]), ("name", 5), ("cache", "x"),
        ("points", torch.zeros(3)), ("points", torch.zeros(4, 3, dtype=torch.complex64)),
    ],
)  # fmt: skip
def test_an_attribute_of_a_module(make: Callable[[], Running], name: str, value: Any) -> None:
    module = torch.nn.Sequential(make())
    saved = {**module.state_dict(), f"0.{name}": value}
    before = dict(vars(module[0]))
    with (
        pytest.raises(CheckpointError, match=rf"here was not loaded: '{name}' of its .* unlike in the script"),
        checked_modules("here"),
    ):
        module.load_state_dict(saved)
    assert vars(module[0]).keys() == before.keys()
    assert module[0].mean is before["mean"]
    assert module[0].rate == 0.5
    assert module[0].points.shape == (4, 3)


@pytest.mark.parametrize("make", [Loading, lambda: Running(by_hook=True)])
def test_what_a_module_may_change(make: Callable[[], Running]) -> None:
    """A script may give a tensor the size of the loaded one, and may drop what it computes again."""
    module = make()
    values = {"points": torch.ones(9, 3), "mean": torch.ones(5), "rate": torch.tensor(2.0), "cache": None}
    with checked_modules("here"):
        module.load_state_dict({**module.state_dict(), **values})
    assert module.points.shape == (9, 3)
    assert module.mean.shape == (5,)
    assert module.rate == 2
    assert module.cache is None


@pytest.mark.parametrize("count", [-1, -(1 << 62), (1 << 63) - 1, float("nan"), float("inf"), -0.5])
@pytest.mark.parametrize("load", _LOADS)
def test_a_count_of_a_module(load: Callable[..., None], count: float, tmp_path: Path) -> None:
    """With momentum=None, a BatchNorm divides by its count, and an averaged model divides by its number of models."""
    for module, name in (
        (torch.nn.Sequential(torch.nn.BatchNorm1d(2, momentum=None)), "0.num_batches_tracked"),
        (AveragedModel(torch.nn.Linear(2, 2)), "n_averaged"),
    ):
        saved = {**module.state_dict(), name: torch.tensor(count)}
        with pytest.raises(CheckpointError, match=f"model.* was not loaded: '{name}' of its module is .* no count"):
            load(tmp_path, saved, module)
        load(tmp_path, {**saved, name: torch.tensor(7)}, module)
        assert module.state_dict()[name] == 7


def test_tensors_in_tuples_are_copied_too() -> None:
    """A metric may keep such a tensor. If it were mapped from a file, another person could change it later."""
    tensor = torch.ones(2)
    copied = unmapped({"a": [(tensor, 5)]})
    assert copied["a"][0][0] is not tensor
    assert copied["a"][0][1] == 5


_PROGRAM = """
import sys, torch
from safepoint import session
torch.manual_seed(0)
torch.set_num_threads(1)

class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("order", torch.arange(4))

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 4 else float(sys.argv[2]))
data = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)
with session(model=model, optimizer=optimizer, scheduler=scheduler, data=data, save_steps=2) as run:
    for batch in run.batches(1):
        if run.step_number >= int(sys.argv[1]):
            break
        model(batch[:, model.order]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.step()
"""


def _run(folder: Path, steps: int, factor: str = "1") -> Job:
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    options = ("--max-restarts", "0", "--output-dir", str(folder / "run"))
    return safepoint(folder / "run", *options, program=[str(program), str(steps), factor])


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_step_that_fails_after_a_resume(tmp_path: Path) -> None:
    """A buffer of indices has the right kind, and names an element that does not exist."""
    with no_orphans(job := _run(tmp_path, 2)):
        assert job.wait() == ExitCode.OK, job.text
    path = tmp_path / "run" / "checkpoint-2" / "model.pt"
    torch.save({**torch.load(path), "order": torch.tensor([0, 1, 2, 99])}, path)
    reseal(path.parent)
    with no_orphans(job := _run(tmp_path, 6)):
        assert job.wait() == ExitCode.FAILED, job.text
    assert "IndexError" in job.text
    assert f"failed in its first step after it resumed from {path.parent}; if a state" in job.text


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_learning_rate_that_a_start_refuses(tmp_path: Path) -> None:
    """The script's own function returns NaN: the first save with this rate says so."""
    with no_orphans(job := _run(tmp_path, 8, "nan")):
        assert job.wait() == ExitCode.OK, job.text
    assert job.text.count("the learning rate is nan at step 4; a start refuses checkpoints with such a rate") == 1
    with no_orphans(job := _run(tmp_path, 10)):
        assert job.wait() == ExitCode.NOTHING_VALID, job.text
