"""Checks every request before its route, and adds the headers that protect a page in the browser.

A request needs one of the dashboard's own names as its Host. A request that a page of another origin has sent is
refused, unless the person has followed a link to a page. A request also needs a visitor, whom a cookie or a trusted
proxy names; only the exchange of a link and static files need none. A POST needs an operator and the token of the
operator's session.
"""

import logging
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from safepoint.dashboard.access.proxies import TwoUsersError, proxied_visitor
from safepoint.dashboard.access.sessions import Sessions, Visitor
from safepoint.dashboard.rendering import Refusal, refuse
from safepoint.dashboard.settings import DashboardSettings

FORM_TOKEN = "form_token"
"""The name of the form field that has the token of the session."""
TOKEN_HEADER = b"x-form-token"
ENTER = "/enter"
STATIC = "/static/"
_BUG = Refusal(
    500,
    "the dashboard could not answer",
    hint="this is a bug in Safepoint; report it with the lines on the terminal",
)
_MOST_REQUESTS = 96
"""The limit of requests of one session that are answered at a time. A request counts until it is answered, even if
its connection has ended before, because until then it also counts for the server's own limit of requests."""
_TOO_MANY = Refusal(
    429,
    "too many requests of this session are not answered yet; this one was refused",
    hint="wait for the others, and load the page again",
)
_log = logging.getLogger("safepoint")
_MOST_BYTES = 64 << 10
_MOST_FIELDS = 50
_MOST_COOKIES = 1000
"""How many cookies of a request are examined. A browser keeps about 180 cookies for an address."""
_SECURITY = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # The address of a page may contain the token of a link, so other sites must not get the address. With
    # `no-referrer`, browsers would not state the origin of a form.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Guard:
    """The middleware around all routes.

    Args:
        app: the routes. In `scope["state"]` they find `visitor`, `form` (the fields of a POST) and `wants_json`.
        settings: the options of the dashboard.
        sessions: the links and cookies of visitors.
        cookie: the name of the cookie.
    """

    def __init__(self, app: ASGIApp, *, settings: DashboardSettings, sessions: Sessions, cookie: str) -> None:
        self._app = app
        self._settings = settings
        self._sessions = sessions
        self._cookie = cookie
        self._running: Counter[str] = Counter()
        """How many requests of each session are not answered yet."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. The start and the end of the server are passed on to the routes."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        _note_json(scope, state)
        is_static = scope["path"].startswith(STATIC)
        # A request for many ranges of a file would take memory for each range. The files are small, so each answer
        # has the whole file.
        scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"range"]

        async def send_protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = {**_SECURITY, "cache-control": "max-age=86400" if is_static else "no-store"}
                sent = {name for name, _ in message["headers"]}
                new = [(name.encode(), text.encode()) for name, text in added.items() if name.encode() not in sent]
                message["headers"] = [*message["headers"], *new]
            await send(message)

        try:
            await self._check(scope, receive, state)
        except Refusal as refusal:
            await refuse(refusal, state)(scope, receive, send_protected)
            return
        visitor: Visitor | None = state["visitor"]
        session = "" if visitor is None else visitor.session
        if session and self._running[session] >= _MOST_REQUESTS:
            await refuse(_TOO_MANY, state)(scope, receive, send_protected)
            return
        self._running[session] += 1
        try:
            await self._answer(scope, receive, send_protected)
        finally:
            self._running[session] -= 1
            if not self._running[session]:
                del self._running[session]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:  # the server's own answer would lack the headers
            if has_begun:
                raise
            _log.exception("the dashboard could not answer %s %s", scope["method"], scope["path"])
            await refuse(_BUG, scope["state"])(scope, receive, send)

    async def _check(self, scope: Scope, receive: Receive, state: MutableMapping[str, Any]) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._check_host(headers)
        self._check_origin(scope["method"], headers)
        state["visitor"] = visitor = self._visitor(scope, headers)
        if scope["method"] not in {"GET", "HEAD", "POST"}:
            raise Refusal(405, "this method is not supported")
        if scope["path"] == ENTER or scope["path"].startswith(STATIC):
            if scope["method"] == "POST":
                raise Refusal(405, "this address accepts no form")
            return
        if visitor is None:
            raise Refusal(
                401,
                "you are not signed in",
                hint="open the link that the terminal of `safepoint dashboard` shows; each link works once",
            )
        state["form_token"] = self._sessions.form_token(visitor)
        if scope["method"] == "POST":
            state["form"] = form = await _read_form(headers, receive)
            given = next((value.decode("latin-1") for name, value in headers if name == TOKEN_HEADER), None)
            if not self._sessions.is_form_token(visitor, given or form.get(FORM_TOKEN, "")):
                raise Refusal(
                    403,
                    "the form is not one of this session; nothing was done",
                    hint="load the page again, and repeat",
                )
            if not visitor.is_operator:
                raise Refusal(
                    403,
                    "you may read, but not change; nothing was done",
                    hint="ask an operator for a link for operators",
                )

    def _visitor(self, scope: Scope, headers: list[tuple[bytes, bytes]]) -> Visitor | None:
        user = scope["state"].get("user", "")
        try:
            visitor = proxied_visitor(self._settings, scope.get("client"), headers, user)
        except TwoUsersError:
            raise Refusal(400, "the proxy has named two users; the request was refused") from None
        if visitor is not None:
            return visitor
        found = (self._sessions.visitor_of(cookie, user) for cookie in _cookies_of(headers, self._cookie))
        # A viewer with a program at the same address can put a cookie of their own before the cookie of an operator.
        return max((one for one in found if one is not None), key=lambda one: one.is_operator, default=None)

    def _check_host(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Refuse a Host that is not a name of the dashboard.

        This check prevents DNS rebinding, with which a stranger's page could read the dashboard under the name of the
        stranger's site.
        """
        hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
        if len(hosts) != 1 or _without_port(hosts[0]) not in self._settings.accepted_names:
            raise Refusal(
                421,
                "the dashboard does not answer under this name",
                hint="if the name is right, start the dashboard with --name NAME",
            )

    def _check_origin(self, method: str, headers: list[tuple[bytes, bytes]]) -> None:
        """Refuse requests of pages of another origin, except for links. Browsers state the origin; programs need not.

        For a browser, all ports of an address are one site. So a page of any program at the same address could send
        requests with the cookie, such as searches that take long.
        """
        found = {name: value.decode("latin-1").lower() for name, value in headers}
        origin, site = found.get(b"origin"), found.get(b"sec-fetch-site")
        if method == "POST":
            is_own = site in {None, "same-origin"}
        else:  # `none`: the person has typed the address
            is_link = (found.get(b"sec-fetch-mode"), found.get(b"sec-fetch-dest")) == ("navigate", "document")
            is_own = site in {None, "same-origin", "none"} or is_link
        scheme, _, host = (origin or "").partition("://")
        # Without TLS, a proxy may answer the browser with TLS, so both schemes are possible.
        schemes = {"https"} if self._settings.has_tls else {"http", "https"}
        is_same = scheme in schemes and host == found.get(b"host")
        if not is_own or (origin is not None and not is_same):
            raise Refusal(
                403,
                "a page of another site has sent this request; nothing was done",
                hint="open the address of the dashboard in a window of its own",
            )


def _note_json(scope: Scope, state: MutableMapping[str, Any]) -> None:
    """Note whether the request asks for JSON, by its path or its header. The routes get the path without `.json`."""
    path: str = scope["path"]
    accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
    state["wants_json"] = accepted.partition(b";")[0].partition(b",")[0].strip() == b"application/json"
    if path.endswith(".json") and not path.startswith(STATIC):
        state["wants_json"] = True
        scope["path"] = path.removesuffix(".json")
        scope["raw_path"] = scope["path"].encode()


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


async def _read_form(headers: list[tuple[bytes, bytes]], receive: Receive) -> Mapping[str, str]:
    """The fields of a form. If a name occurs several times, the last value counts."""
    kind = next((value for name, value in headers if name == b"content-type"), b"")
    body = b""
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise Refusal(400, "the form is incomplete; nothing was done")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > _MOST_BYTES:
            raise Refusal(413, "the form is too large; nothing was done")
    if body and kind.split(b";")[0].strip().lower() != b"application/x-www-form-urlencoded":
        raise Refusal(415, "the form has another type than application/x-www-form-urlencoded; nothing was done")
    try:
        fields = parse_qs(body.decode("ascii"), max_num_fields=_MOST_FIELDS, keep_blank_values=True, errors="strict")
    except ValueError as error:
        raise Refusal(400, "the form cannot be read; nothing was done") from error
    return {name: values[-1] for name, values in fields.items()}


def set_cookie(response: Response, *, name: str, value: str, lasts_s: int, is_secure: bool) -> None:
    """Give a session to the browser."""
    response.set_cookie(name, value, max_age=lasts_s, path="/", secure=is_secure, httponly=True, samesite="strict")


def _cookies_of(headers: Sequence[tuple[bytes, bytes]], wanted: str) -> list[str]:
    """The values of all cookies of a name. A program at the same address may have set another cookie of this name."""
    found: list[str] = []
    num_left = _MOST_COOKIES
    for name, value in headers:
        if name == b"cookie":
            parts = value.decode("latin-1").split(";", num_left)[:num_left]
            num_left -= len(parts)
            for part in parts:
                key, _, text = part.strip().partition("=")
                if key == wanted:
                    found.append(text)
    return found
