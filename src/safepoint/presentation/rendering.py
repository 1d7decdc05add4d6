"""Templates of HTML, for pages and for cells of a notebook.

Promises: every value in a page is escaped, shows no credentials, has no control characters, and is not longer than
16,384 characters.
"""

import datetime
import math
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from safepoint._version import __version__
from safepoint.answers.situation import age_s
from safepoint.errors import printable as _printable
from safepoint.foundation import clock
from safepoint.foundation.units import format_age, format_bytes, format_duration, plural
from safepoint.presentation.tones import OTHER_WORDS

_MOST_CHARACTERS = 16_384
"""The maximum number of characters of a value that are shown. A value may be very long, because a stranger may have
written it."""
_DAY_S = 86_400.0
_DAYS_FROM_S = 2 * _DAY_S
_MOST_SPAN_S = 1000 * _DAY_S
NOTHING = "—"
"""The text for a value that is not known."""


def _finalize(value: Any) -> Any:
    """The text of a value in a template. Values of type `Markup` come only from templates, and from the filters of
    this module."""
    if value is None:
        return ""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    left_out = len(value) - _MOST_CHARACTERS
    shown = _printable(value[:_MOST_CHARACTERS])
    return f"{shown} … ({left_out:,} more characters)" if left_out > 0 else shown


def _time(time: str | float | None, *, is_age: bool = True) -> Markup:
    """A `time` element: the age of a time, and the exact time in UTC. A script shows it in the viewer's time zone."""
    if time is None or time == "":
        return Markup(NOTHING)
    try:
        since_s = clock.parse_utc(time) if isinstance(time, str) else time
        exact = clock.date_of(since_s)
    except ValueError:
        return Markup.escape(_printable(str(time)))
    shown = f"{format_age(age_s(exact.isoformat()))} ago" if is_age else _short_date(exact)
    return Markup('<time datetime="{}" title="{}"{}>{}</time>').format(
        exact.isoformat(timespec="milliseconds"),
        exact.strftime("%Y-%m-%d %H:%M:%S UTC"),
        Markup("") if is_age else Markup(' data-exact=""'),
        shown,
    )


def _short_date(date: datetime.datetime) -> str:
    return date.strftime("%m-%d %H:%M:%S")


def _number(value: float | None, digits: int = 4) -> str:
    """A number with few digits; `—` for None and for a value that is not finite."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def _exact_time(time: str | float | None) -> Markup:
    return _time(time, is_age=False)


def _duration(seconds: float | None) -> str:
    return NOTHING if seconds is None else format_duration(seconds)


def _span(seconds: float | None) -> str:
    """A duration that may be days: `9 d`, `3 h 05 m`."""
    if seconds is not None and seconds >= _DAYS_FROM_S:
        return f"{seconds / _DAY_S:,.0f} d" if seconds < _MOST_SPAN_S else "years"
    return _duration(seconds)


def _size(num_bytes: int | None) -> str:
    return NOTHING if num_bytes is None else format_bytes(num_bytes)


def _quoted(text: str) -> str:
    """A text as a part of an address.

    A path on this machine may have bytes that are not UTF-8. Jinja's own filter `urlencode` raises an exception for
    such a path.
    """
    return quote(text, safe="/", errors="surrogateescape")


def make_environment(package: str) -> jinja2.Environment:
    """The Jinja environment of a package. Its templates may also use the templates of `safepoint.presentation`.

    Args:
        package: the name of the package, which has its templates in the folder `templates`.
    """
    loaders = [jinja2.PackageLoader(one, "templates") for one in (package, "safepoint.presentation")]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "ago": _time,
        "at": _exact_time,
        "duration": _duration,
        "span": _span,
        "size": _size,
        "number": _number,
        "urlencode": _quoted,
        "count": plural,
    }
    environment.filters.update(filters)  # pyright: ignore[reportUnknownMemberType]
    shared: dict[str, Any] = {"release": __version__, "other_words": OTHER_WORDS}
    environment.globals.update(shared)  # pyright: ignore[reportUnknownMemberType]
    return environment
