"""Signals before the training do not count in it."""

import signal
from collections.abc import Iterator

import pytest

from safepoint.training.context import termination as termination_module
from safepoint.training.context.termination import Termination


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of this process, restored afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    wakeup = signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(wakeup)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_an_interrupt_that_the_script_caught_before_its_training_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one in the training saves; only the second one ends the process at once."""
    codes: list[int] = []
    monkeypatch.setattr(termination_module.os, "_exit", codes.append)
    termination = Termination(within_s=60)
    with pytest.raises(KeyboardInterrupt):
        termination._handle(signal.SIGINT, None)
    termination.enter_training(lambda: None)
    termination._handle(signal.SIGINT, None)
    assert (termination.stop_signal, codes) == (signal.SIGINT, [])
    termination._handle(signal.SIGINT, None)
    assert codes == [130]
    termination.leave_training()
