"""Responses of the dashboard: a page or its JSON document, and refusals.

Texts that strangers have written are searched for passwords, which may take long. So pages and documents are made on
threads, and other requests are answered meanwhile.
"""

import asyncio
import json
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from safepoint.answers.versions import versioned
from safepoint.errors import (
    AccessDeniedError,
    ConflictError,
    ExitCode,
    NotFoundError,
    SafepointError,
    UnsupportedError,
    UsageError,
    WaitTimeoutError,
    without_credentials,
)
from safepoint.foundation import clock
from safepoint.presentation.rendering import make_environment

_STATUS: tuple[tuple[type[SafepointError], int], ...] = (
    (NotFoundError, 404),
    (ConflictError, 409),
    (UsageError, 400),
    (UnsupportedError, 501),
    (AccessDeniedError, 502),
    (WaitTimeoutError, 504),
)


class Refusal(Exception):  # noqa: N818  it is an answer, not a fault of the program
    """Ends a request with a response that gives the reason.

    Args:
        status: the HTTP status.
        message: what was refused, and what was done.
        hint: what the visitor can do.
    """

    def __init__(self, status: int, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.hint = hint


_TEMPLATES = make_environment("safepoint.dashboard")
_TEMPLATES.globals["now"] = clock.utc_now  # pyright: ignore[reportUnknownMemberType]


def render(template: str, **values: Any) -> str:
    """The HTML of a template."""
    return _TEMPLATES.get_template(template).render(**values)


async def respond(
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
        document: the response as JSON values, without the version.
        status: the HTTP status.
        values: the values that the template shows.
    """
    if request.state.wants_json:
        return await json_response(document, status=status)
    shared = {
        "visitor": getattr(request.state, "visitor", None),
        "form_token": getattr(request.state, "form_token", ""),
        "path": request.url.path,
    }
    html = await asyncio.to_thread(render, template, **shared, **values)
    return HTMLResponse(html, status_code=status, headers={"vary": "Accept"})


async def json_response(document: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, status: int = 200) -> Response:
    """The document with its version, as a command prints it with `--json`."""
    text = await asyncio.to_thread(_json_of, document)
    return Response(text, status_code=status, media_type="application/json", headers={"vary": "Accept"})


def _json_of(document: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
    whole = versioned(document) if isinstance(document, Mapping) else [versioned(one) for one in document]
    text = json.dumps(whole, separators=(",", ":"))
    if "NaN" in text or "Infinity" in text:  # JSON has no such numbers, but these words may also be in texts
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), separators=(",", ":"))
    return without_credentials(text)


def sentence_of_error(error: SafepointError) -> str:
    """The message of an error and its hint, as a part of a page."""
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}."


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
