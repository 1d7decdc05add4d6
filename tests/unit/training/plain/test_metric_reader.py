"""Reading what a loop has computed."""

import torch

from safepoint.training.plain.metric_reader import MetricReader, without_graph


def test_numbers_and_tensors_of_one_are_read() -> None:
    """What is neither is left out."""
    loss = torch.tensor(2.5, requires_grad=True) * 2
    metrics = {"loss": loss, "count": 3, "flag": True, "name": "x", "none": None, "many": torch.ones(2)}
    read = MetricReader().read({**metrics, "lr": torch.tensor([0.5])})
    assert read == {"loss": 5.0, "count": 3.0, "lr": 0.5}


def test_a_loss_does_not_keep_its_graph() -> None:
    """A reader of the loss must not keep the activations of a step."""
    metrics = without_graph({"loss": torch.ones((), requires_grad=True) * 2, "count": 3})
    assert metrics["loss"].grad_fn is None
    assert metrics["count"] == 3
