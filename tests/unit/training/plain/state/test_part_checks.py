"""What a session refuses at its start, because its first save would hang or lose something."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from safepoint.errors import UsageError
from safepoint.foundation.environment import Place
from safepoint.training.plain.state.parts import NamedParts


def engine_of(model: torch.nn.Module) -> torch.nn.Module:
    """As DeepSpeed wraps it."""
    kind: Any = type("DeepSpeedEngine", (torch.nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    engine = kind()
    engine.module = model
    return engine


def partitioned(model: torch.nn.Module) -> torch.nn.Module:
    """As DeepSpeed leaves a model under ZeRO-3."""
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number  # type: ignore[attr-defined]
    return model


def zero_optimizer() -> Any:
    base: Any = type("DeepSpeedOptimizer", (), {"__module__": "deepspeed.runtime.base_optimizer"})
    return type("DeepSpeedZeroOptimizer", (base,), {"__module__": "deepspeed.runtime.zero.stage_1_and_2"})()


def refused(**parts: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        NamedParts(parts, Place())
    return caught.value


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use:UserWarning")
def test_fsdp_of_before() -> None:
    """FullyShardedDataParallel, also somewhere inside of a model."""
    inner = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    for model in (inner, torch.nn.Sequential(inner)):
        error = refused(model=model, optimizer=adam(model))
        assert "cannot save model" in str(error)
        assert "fully_shard" in str(error.hint)


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, of importing
def test_an_optimizer_in_parts() -> None:
    """ZeroRedundancyOptimizer, under DistributedDataParallel."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    error = refused(model=model, optimizer=optimizer)
    assert "cannot save optimizer" in str(error)
    assert "DistributedDataParallel" in str(error.hint)


def test_deepspeed() -> None:
    """An engine, the model in it, or its optimizer."""
    model = torch.nn.Linear(4, 4)
    for parts in (
        {"model": engine_of(model), "optimizer": adam(model)},
        {"model": model, "optimizer": zero_optimizer()},
        {"model": partitioned(torch.nn.Linear(4, 4)), "optimizer": adam(model)},
    ):
        assert "accelerator" in str(refused(**parts).hint)


@pytest.mark.usefixtures("group")
def test_what_is_saved() -> None:
    """One process, and replicas."""
    for model in (torch.nn.Linear(4, 4), DistributedDataParallel(torch.nn.Linear(4, 4))):
        assert NamedParts({"model": model, "optimizer": adam(model)}, Place()).strategy == "single"


class Average:
    """Of weights, as scripts keep it: neither a module nor an optimizer."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.weights = {name: one.detach().clone() for name, one in module.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


@pytest.mark.usefixtures("group")
def test_shards_of_what_only_the_first_rank_writes_are_refused() -> None:
    """Every rank would be given the first one's."""
    model = torch.nn.Linear(4, 4)
    whole = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "average": Average(model)}
    NamedParts(whole, Place())
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    sharded = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "average": Average(model)}
    with pytest.raises(UsageError, match="cannot save average: its state has sharded tensors"):
        NamedParts(sharded, Place())
