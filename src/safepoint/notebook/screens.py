"""Where a watched job is shown: as a picture in the running cell of a notebook, or as lines of text."""

import importlib
import sys
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from safepoint.foundation import clock
from safepoint.notebook.html import job_html
from safepoint.notebook.text import event_lines, job_line, job_text
from safepoint.notebook.views import JobDetails, JobView

_LINE_EVERY_S = 10.0


class Screen(Protocol):
    """Shows a job that is being watched."""

    def show(self, view: JobView, details: JobDetails, note: str) -> None:
        """Show the job as it is now.

        Args:
            view: the job.
            details: its curves, events and checkpoints.
            note: a sentence to add; may be empty.
        """
        ...


class CellScreen:
    """Shows the job in the output of a cell. Each picture replaces the picture before it.

    Args:
        display: IPython's function `display`.
    """

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        # The ID is made here: if the first call of `display` is interrupted, the next call uses the same ID.
        self._id = uuid.uuid4().hex
        self._is_shown = False

    def show(self, view: JobView, details: JobDetails, note: str) -> None:
        """Show the job, in place of what was shown before."""
        html = job_html(view, details, note=note)
        picture = {"text/plain": job_text(view, note=note)} | ({} if html is None else {"text/html": html})
        self._display(picture, raw=True, display_id=self._id, update=self._is_shown)
        self._is_shown = True


class LineScreen:
    """Prints a line for each event and for each change of the job's state, and every ten seconds a line with its
    progress.

    Args:
        print_line: prints a line.
    """

    def __init__(self, print_line: Callable[[str], Any] = print) -> None:
        self._print = print_line
        self._num_events: int | None = None
        self._state: object = None
        self._line = ""
        self._next_s = float("-inf")
        self._note = ""

    def show(self, view: JobView, details: JobDetails, note: str) -> None:
        """Print what is new."""
        events, known = details.events, self._num_events
        for line in event_lines(events[known:] if known is not None else ()):
            self._print(f"  {line}")
        self._num_events = len(events)
        line = job_line(view)
        if view.state != self._state or (line != self._line and clock.monotonic_s() >= self._next_s):
            self._print(line if view.state == self._state else job_text(view))
            self._state, self._line, self._next_s = view.state, line, clock.monotonic_s() + _LINE_EVERY_S
        if note and note != self._note:
            self._print(f"  {note}")
        self._note = note


def screen_here() -> Screen:
    """The running cell, if this program runs in a notebook; otherwise lines on stdout."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    if getattr(shell, "kernel", None) is None:  # IPython in a terminal cannot replace what it has shown
        return LineScreen()
    module: Any = importlib.import_module("IPython.display")
    return CellScreen(module.display)
