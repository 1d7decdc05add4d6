"""The context of a rank without signal handlers and without a keeper."""

from typing import Any

from safepoint.foundation.environment import Place
from safepoint.foundation.events.stream import Event
from safepoint.settings.run_settings import RunSettings
from safepoint.training.context.rank_context import RankContext

_LONE = Place()


def rank_context(place: Place = _LONE, *, reported: list[Event] | None = None, **settings: Any) -> RankContext:
    """The context of the rank at `place`; its reports are appended to `reported`."""
    context = RankContext(RunSettings(**settings), place)
    if reported is not None:
        context.reporter.report = reported.append
    return context
