"""Models and tensors beside the trained model: a teacher that follows it, and a reference that does not."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.errors import ConflictError
from safepoint.training.integrations.transformers.resume.kept_models import KeptModels


class Follows:
    """As TRL's callbacks: of SDFT and SDPO, of `sync_ref_model`, and of BEMA."""

    def __init__(self, model: torch.nn.Module, teacher: torch.nn.Module | None) -> None:
        self.teacher = teacher
        self.shadow_weights = {"a": torch.zeros(2)}
        self.thetat_params = list(model.parameters())

    def step(self) -> None:
        self.shadow_weights["a"] += 1
        if self.teacher is not None:
            for weight in self.teacher.parameters():
                weight.data.mul_(0.5)


def trainer(seed: int, *, is_followed: bool = True) -> Any:
    torch.manual_seed(seed)
    model, reference, teacher = (torch.nn.Linear(3, 3) for _ in range(3))
    callback = Follows(model, teacher if is_followed else None)
    return SimpleNamespace(
        model=model,
        model_wrapped=torch.nn.Sequential(model),
        ref_model=reference,
        teacher_model=torch.nn.DataParallel(teacher),
        callback=callback,
        callback_handler=SimpleNamespace(callbacks=[callback]),
        accelerator=SimpleNamespace(distributed_type="NO"),
        args=SimpleNamespace(),
        is_deepspeed_enabled=False,
        is_fsdp_enabled=False,
    )


@pytest.fixture(autouse=True)
def _whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{KeptModels.__module__}.splits_weights", lambda trainer: False)


@pytest.mark.parametrize("is_followed", [True, False])
def test_a_teacher_that_changes(is_followed: bool, tmp_path: Path) -> None:
    """It may be a callback or the trainer itself that changes it. What stays frozen is not saved."""
    first = trainer(1, is_followed=is_followed)
    kept = KeptModels(first)
    kept.loop_begins(None)
    first.callback.step()
    if not is_followed:
        first.teacher_model.module.weight.data[2, 2] += 1
    kept.write(tmp_path)
    files = [path.name.partition("-")[0] for path in tmp_path.iterdir()]
    assert sorted(files) == ["safepoint_kept_Follows_shadow_weights", "safepoint_kept_teacher_model"]
    second = trainer(2, is_followed=is_followed)
    reference, own = (copy.deepcopy(one.state_dict()) for one in (second.ref_model, second.model))
    KeptModels(second).loop_begins(tmp_path)
    assert torch.equal(second.teacher_model.module.weight, first.teacher_model.module.weight)
    assert second.callback.shadow_weights["a"].tolist() == [1, 1]
    assert all(torch.equal(second.ref_model.state_dict()[name], one) for name, one in reference.items())
    assert all(torch.equal(second.model.state_dict()[name], one) for name, one in own.items())


def test_a_checkpoint_of_an_older_release(tmp_path: Path) -> None:
    """The names of its files have no digest. Its teacher and its tensors are loaded, too."""
    first, second = trainer(1), trainer(2)
    torch.save(first.teacher_model.module.state_dict(), tmp_path / "safepoint_kept_teacher_model.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "safepoint_kept_Follows_shadow_weights.pt")
    KeptModels(second).loop_begins(tmp_path)
    assert torch.equal(second.teacher_model.module.weight, first.teacher_model.module.weight)
    assert second.callback.shadow_weights["a"].tolist() == [1, 1]


def test_two_callbacks_of_one_class(tmp_path: Path) -> None:
    """Such as two averages with different rates. Each has its own file, also if one is still without tensors."""
    first, second = trainer(1), trainer(2)
    for one in (first, second):
        one.callback_handler.callbacks.append(Follows(one.model, torch.nn.Linear(3, 3)))
    for number, callback in enumerate(first.callback_handler.callbacks):
        callback.shadow_weights["a"] += number + 1
    kept = KeptModels(first)
    kept.loop_begins(None)
    kept.write(tmp_path)
    KeptModels(second).loop_begins(tmp_path)
    pairs = list(zip(first.callback_handler.callbacks, second.callback_handler.callbacks, strict=True))
    assert [now.shadow_weights["a"].tolist() for _, now in pairs] == [[1, 1], [2, 2]]
    assert all(torch.equal(before.teacher.weight, now.teacher.weight) for before, now in pairs)
    assert not torch.equal(pairs[0][1].teacher.weight, pairs[1][1].teacher.weight)
    third = trainer(3)
    third.callback_handler.callbacks.append(Follows(third.model, None))
    third.callback.shadow_weights = {}
    KeptModels(third).loop_begins(tmp_path)
    assert third.callback_handler.callbacks[1].shadow_weights["a"].tolist() == [2, 2]


def test_a_reference_that_follows_keeps_its_file(tmp_path: Path) -> None:
    first = trainer(1)
    first.callback.teacher = first.ref_model
    kept = KeptModels(first)
    kept.loop_begins(None)
    kept.write(tmp_path)
    assert (tmp_path / "safepoint_reference.pt").is_file()


@pytest.mark.parametrize("content", [{"weight": torch.zeros(9, 9)}, {}, 5, [torch.zeros(3)]])
def test_weights_that_do_not_fit(content: Any, tmp_path: Path) -> None:
    kept = KeptModels(first := trainer(1))
    kept.loop_begins(None)
    first.callback.step()
    kept.write(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        before = path.read_bytes()
        torch.save(content, path)
        with pytest.raises(ConflictError, match=r"(\S+) in \S+ does not fit \1 in this run: "):
            KeptModels(trainer(1)).loop_begins(tmp_path)
        path.write_bytes(before)


def test_a_teacher_that_is_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from safepoint.errors import UsageError

    monkeypatch.setattr(f"{KeptModels.__module__}.splits_weights", lambda trainer: True)
    with pytest.raises(UsageError, match="a callback uses the model teacher_model"):
        KeptModels(trainer(1))


def test_tensors_of_a_callback_beside_split_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not saved, and a warning says so once."""
    monkeypatch.setattr(f"{KeptModels.__module__}.splits_weights", lambda trainer: True)
    split = trainer(1, is_followed=False)
    kept = KeptModels(split)
    kept.loop_begins(None)
    kept.write(tmp_path)
    kept.write(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert [record.message for record in caplog.records if "Follows.shadow_weights" in record.message] != []
    assert len(caplog.records) == 1
