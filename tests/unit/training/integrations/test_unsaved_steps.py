"""A script that trains by itself is warned at its first step."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import optimizer as optimizers

from safepoint.training.integrations import unsaved_steps


@pytest.mark.parametrize(
    ("is_empty", "is_first", "num_warnings"), [(True, True, 1), (False, True, 0), (True, False, 0)]
)
def test_the_first_step(
    is_empty: bool,
    is_first: bool,
    num_warnings: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optimizers, "_global_optimizer_pre_hooks", type(optimizers._global_optimizer_pre_hooks)())
    context: Any = SimpleNamespace(
        place=SimpleNamespace(is_first=is_first), outputs=SimpleNamespace(is_empty=is_empty)
    )
    unsaved_steps.install(context)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight])
    weight.grad = torch.ones(1)
    with caplog.at_level(logging.WARNING, logger="safepoint"):
        for _ in range(3):
            optimizer.step()
    assert [
        record.message for record in caplog.records if "the script trains" in record.message
    ].__len__() == num_warnings
