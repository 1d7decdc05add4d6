"""Two callbacks whose names differ in little: each model and each list of tensors in them has a file of its own.

With one file for both, a resume would continue with the tensors of the other callback, without a message.
"""

import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.training.integrations.transformers.resume.kept_models import KeptModels


@pytest.fixture(autouse=True)
def _whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{KeptModels.__module__}.splits_weights", lambda trainer: False)


def callback(kind: str, attribute: str, value: float) -> Any:
    one = type(kind, (), {"__module__": "script"})()
    vars(one)[attribute] = [torch.full((2,), value)]
    return one


def trainer(*callbacks: Any, **attributes: Any) -> Any:
    handler = SimpleNamespace(callbacks=list(callbacks))
    return SimpleNamespace(model=torch.nn.Linear(3, 3), callback_handler=handler, **attributes)


@pytest.mark.parametrize(
    "names",
    [
        [("A", "b_c"), ("A_b", "c")],
        [("A", "b c"), ("A", "b.c")],
        [("A", "b.c"), ("A.b", "c")],
        [("A", "x/../y"), ("A", "x_.._y")],
        [("Ema", "weights"), ("EMA", "weights")],
        [("A", "w"), ("A-2", "w"), ("A", "w")],
        [("A", "\xe9"), ("A", "e\u0301"), ("A", "_")],
        [("A" * 300, "weights"), ("A" * 301, "weights")],
    ],
)
def test_each_callback_gets_its_own_tensors(names: list[tuple[str, str]], tmp_path: Path) -> None:
    """The files have different names on a file system without capital letters, too, and names that it allows."""
    before = [callback(*name, value=number) for number, name in enumerate(names, start=1)]
    kept = KeptModels(trainer(*before))
    kept.loop_begins(None)
    kept.write(tmp_path)
    now = [callback(*name, value=0) for name in names]
    KeptModels(trainer(*now)).loop_begins(tmp_path)
    found = [vars(one)[attribute][0].tolist() for one, (_, attribute) in zip(now, names, strict=True)]
    assert found == [[number, number] for number in range(1, len(names) + 1)]
    files = [path.name for path in tmp_path.iterdir()]
    assert len({unicodedata.normalize("NFC", name.casefold()) for name in files}) == len(names)
    assert all(name.isascii() and name.startswith("safepoint_kept_") for name in files)


def test_a_long_name_without_a_file(tmp_path: Path) -> None:
    KeptModels(trainer(one := callback("A" * 300, "weights", 3))).loop_begins(tmp_path)
    assert vars(one)["weights"][0].tolist() == [3, 3]


def test_a_model_of_the_trainer_beside_one_of_a_callback(tmp_path: Path) -> None:
    def make(value: float) -> tuple[Any, Any]:
        own, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        own.weight.data.fill_(value)
        other.weight.data.fill_(2 * value)
        one: Any = type("A", (), {"__module__": "script"})()
        one.b = other
        return trainer(one, A_b=own), one

    first, _ = make(1.0)
    kept = KeptModels(first)
    kept.loop_begins(None)
    first.A_b.weight.data += 4  # a model of the trainer is saved if it has changed
    kept.write(tmp_path)
    second, follower = make(0.0)
    KeptModels(second).loop_begins(tmp_path)
    assert (second.A_b.weight[0, 0].item(), follower.b.weight[0, 0].item()) == (5.0, 2.0)
