"""The state that the callback adds to a checkpoint of Lightning."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch")
from safepoint.training.integrations.lightning.callback import SafepointCallback


def _callback(num_metrics: int, *, is_first: bool = True) -> SafepointCallback:
    made: Any = SafepointCallback()
    metrics = {f"metric_{number}\n": torch.ones(()) for number in range(num_metrics)}
    made._trainer = SimpleNamespace(callback_metrics=metrics, should_stop=False)
    made._context = SimpleNamespace(place=SimpleNamespace(is_first=is_first), log=logging.getLogger("safepoint"))
    return made


def test_metrics_that_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """The first rank warns once: how many metrics are left out, what follows, and what to do."""
    callback = _callback(10_002)
    assert len(callback.state_dict()["metrics"]) == 10_000
    callback.state_dict()
    (record,) = caplog.records
    text = record.getMessage()
    assert (
        "10,002 metrics, and a checkpoint contains at most 10,000: 2 metrics are left out, the first one is " in text
    )
    assert "metric_10000\\n" in text
    assert "log fewer metrics" in text


@pytest.mark.parametrize(("num_metrics", "is_first"), [(10_000, True), (10_001, False)])
def test_no_warning(num_metrics: int, caplog: pytest.LogCaptureFixture, *, is_first: bool) -> None:
    """There is none if nothing is left out, and none on the other ranks."""
    _callback(num_metrics, is_first=is_first).state_dict()
    assert not caplog.records
