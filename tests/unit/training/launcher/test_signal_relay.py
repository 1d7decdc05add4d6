"""How a signal ends the launcher itself: the exit code, and the line that says so."""

import logging
import os
import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest

from safepoint.settings.run_settings import RunSettings
from safepoint.training.launcher.signal_relay import SignalRelay


class Reporter:
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, str]] = []

    def signal_received(self, number: int) -> None:
        """A signal."""

    def end(self, code: int, reason: str, **_: Any) -> None:
        """The end."""
        self.ends.append((code, reason))


@pytest.mark.parametrize(
    ("numbers", "have_ended", "code", "line"),
    [
        ([signal.SIGTERM], False, 143, "stopped by SIGTERM before the ranks had started"),
        ([signal.SIGINT], False, 130, "stopped by SIGINT before the ranks had started"),
        ([signal.SIGINT, signal.SIGINT], True, 130, "stopped at once by a second SIGINT, without a save"),
    ],
)
def test_the_end_is_reported(
    numbers: list[signal.Signals],
    have_ended: bool,
    code: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On the console, and in the events of the run."""

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    reporter: Any = Reporter()
    folder = tmp_path / "launcher"
    folder.mkdir()
    relay = SignalRelay(RunSettings(), folder, is_alone=True, reporter=reporter)
    if have_ended:
        relay.ranks_ended()
    for number in numbers[:-1]:
        relay._answer(number)
    with caplog.at_level(logging.WARNING, logger="safepoint"), pytest.raises(SystemExit) as ended:
        relay._answer(numbers[-1])
    assert ended.value.code == code
    assert caplog.messages == [line]
    assert reporter.ends == [(code, line)]
