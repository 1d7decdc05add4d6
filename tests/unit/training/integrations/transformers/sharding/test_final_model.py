"""Plans of the final model whose small files cannot be written."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.training.integrations.transformers import trainer_loop
from safepoint.training.integrations.transformers.sharding import final_model
from safepoint.training.integrations.transformers.sharding.final_model import UnplannableError, plan_final_model
from safepoint.training.integrations.transformers.trainer_loop import TrainerLoop
from tests.support.ranks import run_ranks


class Model:
    """One weight, whole on every rank."""

    def named_parameters(self, *, remove_duplicate: bool) -> Any:
        return [("weight", torch.ones(2, 2))]

    def state_dict(self, *, keep_vars: bool) -> dict[str, Any]:
        return dict(self.named_parameters(remove_duplicate=False))


@pytest.fixture(autouse=True)
def no_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_model, "has_adapters", lambda _: False)


def plan_with(error: Exception, folder: Path) -> list[Any]:
    """What each of two ranks gets, if the first one fails while it writes the small files."""

    def save(state: Any) -> None:
        raise error

    return run_ranks(2, lambda peers: plan_final_model(Model(), folder, peers, save, step=None))


def test_a_full_disk_is_an_error_of_the_first_rank(tmp_path: Path) -> None:
    """The whole model would not fit either, so it is not gathered; the other rank does not wait."""
    first, second = plan_with(OSError(errno.ENOSPC, "No space left on device", "config.json"), tmp_path)
    assert isinstance(first, OSError)
    assert first.errno == errno.ENOSPC
    assert second is not None
    assert not isinstance(second, Exception)


@pytest.mark.parametrize("error", [ValueError("a weight is changed"), OSError("the library has no such file")])
def test_a_model_that_cannot_be_planned(error: Exception, tmp_path: Path) -> None:
    """The library refuses it, on all ranks."""
    found = plan_with(error, tmp_path)
    assert [type(one) for one in found] == [UnplannableError] * 2
    assert [str(one) for one in found] == [str(error)] * 2


def test_the_trainer_does_not_gather_the_model_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Any] = []

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, result in (("has_own_model_save", False), ("writes_safetensors", True)):
        monkeypatch.setattr(trainer_loop, name, lambda *_, found=result: found)
    trainer = SimpleNamespace(
        model=Model(), _save=full, save_model=lambda *_, **__: saved.append(_), args=SimpleNamespace()
    )

    def write(peers: Any) -> Any:
        loop: Any = object.__new__(TrainerLoop)
        loop._trainer, loop._peers, loop._base, loop._step_of_final = trainer, peers, None, lambda: 1
        return loop.write_final(tmp_path)

    (found,) = run_ranks(1, write)
    assert isinstance(found, OSError)
    assert saved == []
