"""Which steps of a loop are saved, by what options and script say."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from safepoint.errors import UsageError
from safepoint.settings.run_settings import RunSettings
from safepoint.training.plain.data.position import Position
from safepoint.training.plain.data.tracked_data import TrackedData
from safepoint.training.plain.periodic import Periodic

BATCHES = 5


def data(loader: Any = None) -> TrackedData:
    return TrackedData(loader or DataLoader(TensorDataset(torch.arange(BATCHES))), lambda *_: None)


def saved(
    feed: TrackedData,
    *,
    save_steps: int | None = None,
    batches_per_step: int = 1,
    epochs: int = 2,
    first: int = 1,
    **options: Any,
) -> list[int]:
    """The steps of a loop that are saved; what is left at an epoch's end makes no step."""
    periodic = Periodic(RunSettings(**options), save_steps)
    assert periodic.begin(feed.progress()) == ""
    due: list[int] = []
    step = first - 1
    for batches in feed.epochs(epochs):
        for number, _ in enumerate(batches, 1):
            if number % batches_per_step == 0:
                step += 1
                due += [step] * periodic.is_due(step, feed.progress())
    return due


def test_by_steps() -> None:
    """What the script says, if it says anything."""
    assert saved(data(), save_steps=4) == [4, 8]
    assert saved(data(), save_steps=4, save_strategy="steps") == [4, 8]
    assert saved(data()) == []


@pytest.mark.parametrize("options", [{"save_strategy": "no"}, {"save_every": "1h"}])
def test_not_by_steps(options: dict[str, str]) -> None:
    """The options count more than what the script says."""
    assert saved(data(), save_steps=4, **options) == []


def test_by_epochs() -> None:
    """The last step of each; where the last batches make none, the first one after."""
    assert saved(data(), save_strategy="epoch", save_steps=2) == [5, 10]
    assert saved(data(), save_strategy="epoch", batches_per_step=5) == [1, 2]
    assert saved(data(), save_strategy="epoch", batches_per_step=2, epochs=3) == [3, 5]


@pytest.mark.parametrize(("batches", "expected"), [(3, [7, 12]), (5, [12])])
def test_resumed(batches: int, expected: list[int]) -> None:
    """In the middle of the second epoch, or at its end, which has been saved."""
    feed = data()
    feed.resume(Position(epoch=1, batches=batches), None)
    first = 6 if batches == 3 else 8
    assert saved(feed, save_strategy="epoch", epochs=3, first=first) == expected


@pytest.mark.parametrize(
    ("loader", "strategy"), [(iter(range(3)), "epoch"), (None, "steps")], ids=["a stream", "no number of steps"]
)
def test_what_cannot_be_followed_is_said(loader: Any, strategy: str) -> None:
    """At the start, with the option to give."""
    feed = data(loader)
    periodic = Periodic(RunSettings(save_strategy=strategy), None)
    reported = periodic.begin(feed.progress())
    assert reported.startswith(f"--save-strategy {strategy} has no effect")
    assert "--save-steps" in reported
    assert not periodic.is_due(1, feed.progress())


def test_no_steps() -> None:
    """A number that means nothing is refused."""
    with pytest.raises(UsageError, match="save_steps -1"):
        Periodic(RunSettings(), -1)
