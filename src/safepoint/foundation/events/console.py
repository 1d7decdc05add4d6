"""Lines for a person, on stderr: one per event, coloured on a terminal, plain elsewhere.

The environment variables NO_COLOR and CI turn colours off. stdout is left to the user's program.
"""

import logging
import os
import sys
from typing import Any

from safepoint.errors import in_readers_words, printable, printable_lines
from safepoint.foundation import clock
from safepoint.foundation.units import format_bytes, format_duration

_LOGGER_NAME = "safepoint"
_STYLES = {
    logging.DEBUG: ("", "\033[2m"),
    logging.WARNING: ("warning: ", "\033[33m"),
    logging.ERROR: ("error: ", "\033[31m"),
}
"""The first word of the lines of each level, and their colour on a terminal."""


class _Line(logging.Formatter):
    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        kind, colour = _STYLES.get(record.levelno, ("", ""))
        # A line break in a name must not look like another line of Safepoint.
        text = in_readers_words(super().format(record))
        text = printable_lines(f"safepoint: {kind}{text}").replace("\n", "\n  ")
        return f"{colour}{text}\033[0m" if self._colour and colour else text


class _CurrentStderr(logging.Handler):
    """Writes to the current `sys.stderr`, with one call per line, so that lines of several ranks do not mix."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        try:
            if not _write_beside_bars(text):
                sys.stderr.write(text + "\n")
                sys.stderr.flush()
        except (OSError, ValueError):
            return  # the terminal is closed; this error must not end the training


def _write_beside_bars(text: str) -> bool:
    """If the program draws a tqdm bar, write the line through tqdm, which keeps it apart from the bar.

    Returns:
        Whether the line was written.
    """
    module: Any = sys.modules.get("tqdm")
    try:
        if module is None or not len(module.tqdm._instances):
            return False
        module.tqdm.write(text, file=sys.stderr)
    except (AttributeError, TypeError):  # this is another version of tqdm, or another module of that name
        return False
    return True


def is_interactive() -> bool:
    """Whether stderr is a terminal, and the variable CI is not set."""
    return sys.stderr.isatty() and not os.environ.get("CI")


class ProgressLine:
    """A line that is rewritten in place, for long work on a terminal; silent everywhere else.

    Args:
        what: what is being done, such as `verifying`.
        least_bytes: no line is shown for fewer bytes in total.
    """

    def __init__(self, what: str, *, least_bytes: int = 256 << 20) -> None:
        self._what = what
        self._least_bytes = least_bytes
        self._shown = -1
        self._watched = is_interactive()
        self._started_s = clock.monotonic_s()
        self._width = 0

    def update(self, done_bytes: int, total_bytes: int) -> None:
        """Show `done_bytes` of `total_bytes`."""
        percent = 100 * done_bytes // max(total_bytes, 1)
        if not self._watched or total_bytes < self._least_bytes or percent == self._shown:
            return
        self._shown = percent
        rate = done_bytes / max(clock.monotonic_s() - self._started_s, 1e-3)
        text = f"safepoint: {self._what} {format_bytes(done_bytes)} of {format_bytes(total_bytes)}, {percent} %"
        text += f", {format_bytes(round(rate))}/s"
        if done_bytes < total_bytes and rate > 0:
            text += f", {format_duration((total_bytes - done_bytes) / rate)} left"
        end = "\n" if done_bytes >= total_bytes else ""
        sys.stderr.write(f"\r{printable(text).ljust(self._width)}{end}")  # overwrites the whole previous text
        sys.stderr.flush()
        self._width = len(text)


def set_up(verbosity: int) -> logging.Logger:
    """Make the logger `safepoint` write to stderr, through one handler.

    Args:
        verbosity: 0 shows events, 1 and more also details.
    """
    logger = logging.getLogger(_LOGGER_NAME)
    logger.setLevel(logging.DEBUG if verbosity else logging.INFO)
    logger.propagate = False
    logger.handlers.clear()
    handler = _CurrentStderr()
    handler.setFormatter(_Line(colour=is_interactive() and not os.environ.get("NO_COLOR")))
    logger.addHandler(handler)
    return logger
