"""MetricReader on a device are read without waiting for it."""

import torch

from safepoint.training.plain.metric_reader import MetricReader


def test_a_busy_device_is_not_waited_for() -> None:
    """The first look asks for a copy; one that comes when the device is done has it, and the last one waits."""
    numbers = MetricReader()
    loss = torch.tensor(3.0, device="cuda")
    numbers.read({"loss": loss})
    torch.cuda.synchronize()
    assert numbers.read({"loss": loss}) == {"loss": 3.0}
    matrix = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for _ in range(40):
        matrix = matrix @ matrix / 8192
    metrics = {"loss": matrix.sum() * 0 + 4}
    is_computed = torch.cuda.Event()
    is_computed.record()
    numbers.read(metrics)
    assert numbers.read(metrics) == {}
    assert not is_computed.query(), "the device had nothing left to do: that nothing waits for it was not tested"
    assert numbers.read(metrics, is_last=True) == {"loss": 4.0}
