"""Watches a job until it has stopped, and shows it on a screen.

Promises: nothing here changes the job. If it cannot be read for a while, the last picture stays, and the reads
continue.
"""

from collections.abc import Callable
from dataclasses import replace

from safepoint.errors import NotFoundError, SafepointError
from safepoint.foundation import clock
from safepoint.notebook.screens import Screen
from safepoint.notebook.views import JobDetails, JobView
from safepoint.progress.metric_history import MetricPoint, with_report

_AGES_EVERY_S = 10.0
"""In seconds. After this time, a picture is replaced even if nothing has changed, because it shows ages."""


class StoppedWatchingError(KeyboardInterrupt):
    """The user has interrupted the watch. Jupyter shows no traceback, because nothing has failed."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def watch(read: Callable[[], tuple[JobView, JobDetails]], screen: Screen, *, interval_s: float) -> None:
    """Show a job until it has stopped or was deleted.

    Args:
        read: reads the job and its details. If the details have no metrics, the curves consist of the reports that
            were seen here.
        screen: where the job is shown.
        interval_s: seconds between two reads.

    Raises:
        SafepointError: the first read of the job failed.
        StoppedWatchingError: the wait was interrupted. The job continues.
    """
    observed = _Observed()
    view, details = read()
    shown: object = None
    shown_s, note = float("-inf"), ""
    try:
        while True:
            details = observed.completed(view, details)
            now, now_s = (replace(view, sentence="", read_s=0.0), details, note), clock.monotonic_s()
            if now != shown or now_s - shown_s >= _AGES_EVERY_S:
                screen.show(view, details, note)
                shown, shown_s = now, now_s
            if view.has_stopped:
                return
            clock.sleep(interval_s)
            try:
                view, details = read()
                note = ""
            except NotFoundError:
                screen.show(view, details, "The job was deleted.")
                return
            except SafepointError as error:
                note = f"The job cannot be read now: {error}. Safepoint tries again."
    except KeyboardInterrupt:
        sentence = "You stopped watching. The job continues; this is how it was last seen."
        screen.show(view, details, sentence)
        raise StoppedWatchingError(f"stopped watching {view.name}; the job continues") from None


class _Observed:
    """Collects the metrics of the reports, for a job whose metrics cannot be read."""

    def __init__(self) -> None:
        self._points: list[MetricPoint] = []

    def completed(self, view: JobView, details: JobDetails) -> JobDetails:
        """The details. If they have no metrics, the metrics of the reports that were seen are added.

        If the metrics can be read once, and later cannot, the later reports are added to what was read.
        """
        if details.points:
            self._points = list(details.points)
            return details
        if view.progress is not None:
            self._points = with_report(self._points, view.progress)
        return replace(details, points=self._points)
