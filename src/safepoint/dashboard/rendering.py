"""Answers of the dashboard: a page or its JSON document, and refusals.

Promises: every value in a page is escaped, shows no credentials, and has no control characters.
"""

import datetime
import json
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from safepoint._version import __version__
from safepoint.answers.situation import age_s
from safepoint.answers.versions import versioned
from safepoint.errors import (
    AccessDeniedError,
    ConflictError,
    ExitCode,
    NotFoundError,
    SafepointError,
    UsageError,
    without_credentials,
)
from safepoint.errors import printable as _printable
from safepoint.foundation import clock
from safepoint.foundation.units import format_age, format_bytes, format_duration, plural

_NOTHING = "—"
_STATUS: tuple[tuple[type[SafepointError], int], ...] = (
    (NotFoundError, 404),
    (ConflictError, 409),
    (UsageError, 400),
    (AccessDeniedError, 502),
)


class Refusal(Exception):  # noqa: N818  it is an answer, not a fault of the program
    """Ends a request with an answer that says why.

    Args:
        status: of HTTP.
        message: what was refused, and what was done.
        hint: what the visitor can do.
    """

    def __init__(self, status: int, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.hint = hint


def _finalize(value: Any) -> Any:
    """A value in a template. Markup comes from templates only."""
    if value is None:
        return ""
    return _printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _time(time: str | float | None, *, is_age: bool = True) -> Markup:
    """A `time` element: how long ago, with the exact time in UTC. The script replaces UTC by the viewer's zone."""
    if time is None or time == "":
        return Markup(_NOTHING)
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
    """A number with few digits, `—` for None."""
    if value is None or not math.isfinite(value):
        return _NOTHING
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def _exact_time(time: str | float | None) -> Markup:
    return _time(time, is_age=False)


def _duration(seconds: float | None) -> str:
    return _NOTHING if seconds is None else format_duration(seconds)


def _size(num_bytes: int | None) -> str:
    return _NOTHING if num_bytes is None else format_bytes(num_bytes)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("safepoint.dashboard", "templates"),
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
        "size": _size,
        "number": _number,
        "count": plural,
    }
    environment.filters.update(filters)  # pyright: ignore[reportUnknownMemberType]
    environment.globals["release"] = __version__  # pyright: ignore[reportUnknownMemberType]
    return environment


_TEMPLATES = _environment()


def render(template: str, **values: Any) -> str:
    """The HTML of a template."""
    return _TEMPLATES.get_template(template).render(**values)


def respond(
    request: Request,
    template: str,
    document: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    status: int = 200,
    **values: Any,
) -> Response:
    """The page or, if the request asks for JSON, its document.

    Args:
        request: the request.
        template: the template of the page.
        document: the answer for a program, without the version.
        status: of HTTP.
        values: what the template shows.
    """
    if request.state.wants_json:
        return json_response(document, status=status)
    shared = {
        "visitor": getattr(request.state, "visitor", None),
        "form_token": getattr(request.state, "form_token", ""),
        "path": request.url.path,
    }
    return HTMLResponse(render(template, **shared, **values), status_code=status, headers={"vary": "Accept"})


def json_response(document: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, status: int = 200) -> Response:
    """The document with its version, in the form in which a command prints it with `--json`."""
    whole = versioned(document) if isinstance(document, Mapping) else [versioned(one) for one in document]
    text = without_credentials(json.dumps(whole, separators=(",", ":")))
    return Response(text, status_code=status, media_type="application/json", headers={"vary": "Accept"})


def refuse(refusal: Refusal, state: MutableMapping[str, Any]) -> Response:
    """The answer to a request that was refused."""
    code = ExitCode.NOT_AUTHORISED if refusal.status in {401, 403} else ExitCode.USAGE
    return _failure(refusal.status, int(code), refusal.message, refusal.hint, state)


def fail(error: SafepointError, state: MutableMapping[str, Any]) -> Response:
    """The answer to a request that ended with an error."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    return _failure(status, int(error.exit_code), error.message, error.hint, state)


def _failure(status: int, code: int, message: str, hint: str | None, state: MutableMapping[str, Any]) -> Response:
    document = {"type": "exit_error", "code": code, "message": message, "hint": hint}
    if state.get("wants_json"):
        text = without_credentials(json.dumps(document))
        return Response(text, status_code=status, media_type="application/json")
    shown = f"{message[:1].upper()}{message[1:]}."
    values = {"visitor": state.get("visitor"), "form_token": state.get("form_token", ""), "path": ""}
    html = render("failure.html", status=status, message=shown, hint=hint, **values)
    return HTMLResponse(html, status_code=status)
