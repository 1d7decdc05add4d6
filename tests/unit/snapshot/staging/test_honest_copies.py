"""Saves of unusual states: what is committed is the state of the boundary, or nothing is, and it is said."""

import ctypes
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.errors import SaveError
from safepoint.snapshot.checkpointer import Checkpointer
from safepoint.snapshot.images.image import Image, Placed
from safepoint.snapshot.memory.block import Block
from safepoint.snapshot.staging.stager import Stager, Work, _Copy
from tests.support.snapshots import piece_of

TIMEOUT_S = 50


def loaded(checkpointer: Checkpointer, state: dict[str, Any], step: int, key: str) -> Any:
    path = checkpointer.save(state, step).wait(TIMEOUT_S)
    return torch.load(path / f"{key}.pt")


class Shadow(torch.nn.Module):
    """Gives the same dictionary each time, and puts new tensors into it."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow: OrderedDict[str, Any] = OrderedDict(weight=torch.zeros(8), count=0)

    def update(self, value: float) -> None:
        self.shadow["weight"] = torch.full((8,), value)
        self.shadow["count"] += 1

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return self.shadow


class Wrapping(torch.optim.SGD):
    """An optimizer with more to say, in a dictionary of its own that stays the same."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.slow = {"n": 0}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}


def test_a_state_that_is_the_same_object_with_other_content(tmp_path: Path) -> None:
    """Averages of weights do that, and optimizers around optimizers."""
    shadow, model = Shadow(), torch.nn.Linear(4, 4)
    optimizer = Wrapping(model.parameters(), lr=0.1)
    state = {"average": shadow, "optimizer": optimizer}
    with Checkpointer(tmp_path / "out") as checkpointer:
        for step in range(1, 5):
            shadow.update(float(step))
            optimizer.slow["n"] = step
            saving = checkpointer.save(state, step)
            path = saving.wait(TIMEOUT_S)
            average = torch.load(path / "average.pt")
            assert average["count"] == step
            assert torch.equal(average["weight"], torch.full((8,), float(step)))
            assert torch.load(path / "optimizer.pt")["slow"]["n"] == step


def test_an_operation_that_goes_on_when_the_copy_ends(tmp_path: Path) -> None:
    """It counts its change at its end only; no part of the change is ever committed."""
    model = torch.nn.Linear(2048, 4096, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    noticed = 0
    with Checkpointer(tmp_path / "out", slots=1) as checkpointer:
        for step in range(1, 6):
            with torch.no_grad():
                model.weight.fill_(0.5)
            saving = checkpointer.save(state, step)
            with torch.no_grad():
                model.weight.erfinv_()  # several times as long as the copy
            try:
                path = saving.wait(TIMEOUT_S)
            except SaveError as error:
                assert "changed outside" in str(error)  # noqa: PT017
                noticed += 1
            else:
                assert torch.equal(torch.load(path / "model.pt")["weight"], torch.full((4096, 2048), 0.5))
    # From then on saves are copied before they return.
    assert noticed <= 1


def test_a_storage_of_two_optimizers(tmp_path: Path) -> None:
    """Each of its parameters counts its own changes: it is copied before `save` returns."""
    base = torch.zeros(4_000_000)
    first, second = torch.nn.Parameter(torch.empty(1000)), torch.nn.Parameter(torch.empty(3_999_000))
    first.data, second.data = base[:1000], base[1000:]
    model = torch.nn.Module()
    model.first, model.second = first, second
    other = torch.optim.SGD([second], lr=1.0)
    second.grad = torch.ones_like(second)
    state = {"model": model, "one": torch.optim.SGD([first], lr=1.0), "other": other}
    with Checkpointer(tmp_path / "out", slots=1) as checkpointer:
        checkpointer.save(state, 1).wait(TIMEOUT_S)
        for step in range(2, 5):
            with torch.no_grad():
                second.zero_()
            saving = checkpointer.save(state, step)
            other.step()
            path = saving.wait(TIMEOUT_S)
            assert not torch.load(path / "model.pt")["second"].any()


def test_ctrl_c_while_the_optimizer_helps_to_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training ends normally, without waiting for the part that was being copied."""
    block = Block.allocate(900, 4096)
    placed = Placed(image=Image.of_bytes("x", bytes(16)), block=block, offset=0)
    stager = Stager(lambda *_: None)
    ended: list[bool] = []
    work = Work(placed=[placed], on_begin=lambda: None, on_end=ended.append)
    work.copies, work.is_done = [(placed, _Copy(0, 16, 0, 0))], bytearray(1)
    work.pending[0] = 1

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt  # as Python's own handler of the signal does, between any two instructions

    monkeypatch.setattr(ctypes, "memmove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stager._copy(work, 0)
    assert work.is_torn
    assert all(work.is_done)
    assert not work.pending[0]
    stager.close()
    block.close()


@pytest.mark.filterwarnings("ignore:Validating sparse tensor:UserWarning")  # torch 2.15, whenever it loads one
def test_tensors_without_a_storage(tmp_path: Path) -> None:
    """A sparse buffer is written by torch itself."""
    model = torch.nn.Linear(8, 8)
    model.register_buffer("graph", torch.eye(4).to_sparse())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path / "out") as checkpointer:
        for step in (1, 2):
            content = loaded(checkpointer, {"model": model, "optimizer": optimizer}, step, "model")
            assert torch.equal(content["graph"].to_dense(), torch.eye(4))
            assert torch.equal(content["weight"], model.weight)


def test_a_save_of_the_model_alone_in_between(tmp_path: Path) -> None:
    """The next whole save is copied beside the training again."""
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    whole = {"model": model, "optimizer": optimizer}
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.save(whole, 1).wait(TIMEOUT_S)
        checkpointer.save({"model": model}, 2).wait(TIMEOUT_S)
        checkpointer.save(whole, 3).wait(TIMEOUT_S)
        guard = checkpointer._snapshotter._guard
        assert guard is not None
        assert guard.owner_of(piece_of(model.weight)) is not None
        assert all(not plan.at_once for plan in checkpointer._snapshotter._stager._plans.values())


def test_what_was_saved_long_ago_is_still_saved(tmp_path: Path) -> None:
    """Also when the keeper's connection no longer has its outcome."""
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with Checkpointer(tmp_path / "out") as checkpointer:
        first = checkpointer.save(state, 1)
        first.wait(TIMEOUT_S)
        checkpointer.save(state, 2).wait(TIMEOUT_S)
        keeper = checkpointer._snapshotter.keeper
        keeper._outcomes.clear()
        keeper._requests.clear()
        assert first.is_durable
        assert first.wait(TIMEOUT_S) == tmp_path / "out" / "checkpoint-1"
