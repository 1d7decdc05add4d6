"""Lines for a person: whole, plain outside a terminal, and never the end of the training."""

import io
import logging
import sys

import pytest

from safepoint.foundation.events import console
from safepoint.foundation.events.console import ProgressLine


class Terminal(io.StringIO):
    """Something that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_line_for_each_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix and level; plain text outside a terminal."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    log = console.set_up(0)
    log.info("saved %s", 4)
    log.warning("careful")
    log.error("broken")
    log.debug("details")
    expected = "safepoint: saved 4\nsafepoint: warning: careful\nsafepoint: error: broken\n"
    assert sys.stderr.getvalue() == expected  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    console.set_up(1).debug("details")
    assert sys.stderr.getvalue() == "safepoint: details\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("environ", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"CI": "1"}, False)])
def test_colours_are_for_people(environ: dict[str, str], is_coloured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, unless NO_COLOR or CI says otherwise."""
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", Terminal())
    console.set_up(0).error("broken")
    assert ("\033[31m" in sys.stderr.getvalue()) is is_coloured  # type: ignore[attr-defined]


def test_a_closed_terminal_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logging handler that raised would print a traceback for each line."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    log = console.set_up(0)
    stream.close()
    log.info("stderr is closed")


def test_lines_are_not_glued_to_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the program draws a tqdm bar, a line stands on its own."""
    tqdm = pytest.importorskip("tqdm")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    log = console.set_up(0)
    with tqdm.tqdm(total=10, file=stream, mininterval=0) as bar:
        bar.update(3)
        log.info("saved")
    assert "\nsafepoint: saved\n" in stream.getvalue().replace("\r", "\n")
    log.info("plain again")
    assert stream.getvalue().endswith("safepoint: plain again\n")


def test_progress_is_for_long_work_that_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent in a pod and for little; one line that is rewritten otherwise."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    ProgressLine("verifying").update(1 << 30, 1 << 30)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stderr", Terminal())
    ProgressLine("verifying").update(1, 2)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    line = ProgressLine("verifying")
    for done in (1 << 28, 1 << 29, 1 << 30):
        line.update(done, 1 << 30)
    assert sys.stderr.getvalue().count("\r") == 3  # type: ignore[attr-defined]
    shown = sys.stderr.getvalue().split("\r")  # type: ignore[attr-defined]
    assert "25 %" in shown[1]
    assert "/s, " in shown[1]
    assert " left" in shown[1]
    assert "100 %" in shown[3]
    assert " left" not in shown[3]
    assert shown[3].endswith("\n")


@pytest.fixture(autouse=True)
def restored() -> object:
    """The logger of the other tests is not this module's business."""
    logger = logging.getLogger("safepoint")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before[0], before[1], before[2]
