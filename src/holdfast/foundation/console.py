"""Lines for a person, on stderr: one per event, plain where nobody watches, coloured on a terminal.

NO_COLOR and CI are honoured. stdout belongs to the user's program.
"""

import logging
import os
import sys

from holdfast.foundation.units import format_bytes

_LOGGER_NAME = "holdfast"
_COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m"}


class _Line(logging.Formatter):
    def __init__(self, *, colour: bool) -> None:
        super().__init__("holdfast: %(message)s")
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.ERROR:
            text = text.replace("holdfast: ", "holdfast: error: ", 1)
        elif record.levelno >= logging.WARNING:
            text = text.replace("holdfast: ", "holdfast: warning: ", 1)
        start = _COLOURS.get(record.levelno, "\033[2m" if record.levelno < logging.INFO else "")
        return f"{start}{text}\033[0m" if self._colour and start else text


class _CurrentStderr(logging.Handler):
    """Writes to whatever `sys.stderr` is now, in one write per line, so that lines of ranks do not mix."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            return  # a closed terminal must not end the training


def is_interactive() -> bool:
    """Whether a person watches stderr: a terminal, and not a CI system."""
    return sys.stderr.isatty() and not os.environ.get("CI")


class ProgressLine:
    """A line that is rewritten in place, for long work on a terminal; silent everywhere else.

    Args:
        what: what is being done, such as `verifying`.
        least_bytes: work below this is over before anybody reads the line.
    """

    def __init__(self, what: str, *, least_bytes: int = 256 << 20) -> None:
        self._what = what
        self._least_bytes = least_bytes
        self._shown = -1
        self._watched = is_interactive()

    def update(self, done_bytes: int, total_bytes: int) -> None:
        """Show `done_bytes` of `total_bytes`."""
        percent = 100 * done_bytes // max(total_bytes, 1)
        if not self._watched or total_bytes < self._least_bytes or percent == self._shown:
            return
        self._shown = percent
        end = "\n" if done_bytes >= total_bytes else ""
        sys.stderr.write(
            f"\rholdfast: {self._what} {format_bytes(done_bytes)} of {format_bytes(total_bytes)}, {percent} %{end}"
        )
        sys.stderr.flush()


def set_up(verbosity: int) -> logging.Logger:
    """Give the logger `holdfast` its one handler.

    Args:
        verbosity: 0 events, 1 and more also what they were made of.
    """
    logger = logging.getLogger(_LOGGER_NAME)
    logger.setLevel(logging.DEBUG if verbosity else logging.INFO)
    logger.propagate = False
    logger.handlers.clear()
    handler = _CurrentStderr()
    handler.setFormatter(_Line(colour=is_interactive() and not os.environ.get("NO_COLOR")))
    logger.addHandler(handler)
    return logger


__all__ = ["ProgressLine", "is_interactive", "set_up"]
