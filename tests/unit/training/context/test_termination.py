"""Signals before the training do not count in it."""

import signal
import threading
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


class Clock:
    """A monotonic clock that a test moves."""

    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(termination_module, "clock", clock)
    return clock


def test_the_end_of_the_time_can_be_reserved(clock: Clock) -> None:
    """What a rank does has to be done before; how much is reserved counts at the request to stop."""
    reserved = [5.0]
    termination = Termination(within_s=27, reserved=lambda: reserved[0])
    assert termination.available_s == float("inf")
    termination.begin_stop()
    reserved[0] = 20.0
    assert termination.available_s == 22
    clock.now_s += 2
    termination.begin_stop()
    assert termination.available_s == 20
    greedy = Termination(within_s=27, reserved=lambda: 100.0)
    greedy.begin_stop()
    assert greedy.available_s == 0


def test_a_process_that_was_frozen_has_no_deadline(clock: Clock) -> None:
    """Restored later, it finds the deadline passed. It gets no further one, also not by a later vote."""
    frozen = [False]
    termination = Termination(within_s=27, reserved=lambda: 5.0, was_frozen=lambda: frozen[0])
    termination.begin_stop()
    clock.now_s += 1000
    assert termination.available_s < 0
    frozen[0] = True
    assert termination.available_s == float("inf")
    termination.begin_stop()
    assert termination.available_s == float("inf")


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("was_frozen", [True, False])
def test_the_deadline_ends_a_process_unless_it_was_frozen(was_frozen: bool) -> None:
    """The watch thread looks at the same thing."""
    passed = threading.Event()
    termination = Termination(within_s=0, was_frozen=lambda: was_frozen)
    termination.install(on_signal=lambda _: None, on_stop_outside_training=lambda: None, on_deadline=passed.set)
    termination.begin_stop()
    if was_frozen:
        while termination.available_s < float("inf"):
            threading.Event().wait(0.001)
    assert passed.wait(0.2 if was_frozen else 60) != was_frozen
