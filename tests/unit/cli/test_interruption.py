"""Tests of safepoint.cli.interruption: real signals to this process."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from safepoint.cli.interruption import Interrupted, undoing
from tests.support.commands import safepoint
from tests.support.patience import PATIENCE


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers of this process stay. A shell ignores SIGINT for tests in the background."""
    shell = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    signal.signal(signal.SIGINT, shell)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_only_the_first_signal_interrupts(number: signal.Signals) -> None:
    """Later ones do not interrupt the undoing."""
    undone: list[str] = []

    @undoing("nothing is left")
    def work() -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            undone.append("all")

    with pytest.raises(Interrupted) as interrupt:
        work()
    assert undone == ["all"]
    assert (interrupt.value.number, interrupt.value.exit_code) == (number, 128 + number)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
@pytest.mark.parametrize("as_json", [False, True])
def test_the_second_signal_ends_a_cleanup_that_another_command_can_complete(
    name: str, code: int, as_json: bool
) -> None:
    """At once: no further line of the cleanup runs."""
    program = f"""
import signal, time
from safepoint.cli.interruption import undoing
with undoing("nothing is left", left="files may stay", as_json={as_json}):
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        try:
            signal.raise_signal(signal.{name})
            time.sleep(1000)
        finally:
            print("released")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    message = f"interrupted again by {name}: files may stay"
    if as_json:
        document = json.loads(done.stderr)
        assert (document["code"], document["message"]) == (code, message)
    else:
        assert done.stderr == f"safepoint: error: {message}\n"


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with undoing("nothing is left"):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread() -> None:
    """Only the main thread can take signals."""
    done: list[bool] = []

    def work() -> None:
        with undoing("nothing is left"):
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_the_message_of_a_command(
    number: signal.Signals, code: int, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typer, which ends at a KeyboardInterrupt, does not hide it."""

    def interrupted(*_: Any, **__: Any) -> Any:
        with undoing("nothing is left"):
            signal.raise_signal(number)

    monkeypatch.setattr("safepoint.cli.commands.images.images.opened", interrupted)
    done = safepoint("images", "list", "here", *options)
    assert done.code == code
    message = f"interrupted by {number.name}: nothing is left"
    if options:
        assert (done.exit_error["code"], done.exit_error["message"]) == (code, message)
    else:
        assert done.stderr == f"safepoint: error: {message}\n"
