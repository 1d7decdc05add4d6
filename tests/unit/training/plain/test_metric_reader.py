"""Reading what a loop has computed."""

import torch

from safepoint.training.plain.metric_reader import MetricReader


def test_numbers_and_tensors_of_one_are_read() -> None:
    """What is neither is left out; the newest counts, and what the loop itself offers more than what is added."""
    numbers = MetricReader()
    numbers.offer({"loss": 9.0})
    loss = torch.tensor(2.5, requires_grad=True) * 2
    numbers.offer({"loss": loss, "count": 3, "flag": True, "name": "x", "none": None, "many": torch.ones(2)})
    numbers.add({"loss": 1.0, "lr": torch.tensor([0.5])})
    assert numbers.read() == {"loss": 5.0, "count": 3.0, "lr": 0.5}


def test_a_loss_does_not_keep_its_graph() -> None:
    """A reader of the loss must not keep the activations of a step."""
    numbers = MetricReader()
    numbers.offer({"loss": torch.ones((), requires_grad=True) * 2})
    assert all(one.grad_fn is None for one in numbers._offered.values())
