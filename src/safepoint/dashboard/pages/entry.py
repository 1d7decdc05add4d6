"""The exchange of a one-time link for a cookie, the start page, and new links for others."""

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from safepoint.dashboard.access.guard import ENTER, set_cookie
from safepoint.dashboard.access.sessions import LASTS_S, Role
from safepoint.dashboard.pages.context import context_of
from safepoint.dashboard.rendering import Refusal, refuse, render, respond

_USED = Refusal(
    401,
    "this link is not valid, or was used before",
    hint="the terminal of `safepoint dashboard` shows a new link after each use",
)


async def start(request: Request) -> Response:
    """Redirect `/` to the jobs."""
    return RedirectResponse("/jobs", status_code=303)


async def enter(request: Request) -> Response:
    """Exchange a link for a cookie. The page opens the jobs by itself; ADR 28 states why this is not a redirect."""
    context = context_of(request)
    visitor = None
    if request.method == "GET":  # HEAD must not use up the link: for example, mail servers check links with HEAD
        visitor = context.sessions.exchange(request.query_params.get("token", ""))
    if visitor is None:
        return refuse(_USED, request.scope["state"])
    context.link_used(visitor.role)
    response = HTMLResponse(render("enter.html", visitor=visitor, form_token="", path=""))
    cookie = context.sessions.cookie_of(visitor, getattr(request.state, "user", ""))
    set_cookie(response, name=context.cookie, value=cookie, lasts_s=LASTS_S, is_secure=context.settings.has_tls)
    return response


async def links(request: Request) -> Response:
    """Make a link for another person; operators only."""
    context = context_of(request)
    role = Role.OPERATOR if request.state.form.get("role") == Role.OPERATOR else Role.VIEWER
    token = context.sessions.new_link(role)
    base = context.settings.address_by(request.headers["host"])
    # Only this text is shown with its token. All other texts are shown without passwords and tokens.
    link = Markup.escape(f"{base}{ENTER}?token={token}")
    return await respond(
        request, "link.html", {"path": ENTER, "token": token, "role": str(role)}, link=link, role=role
    )


routes = [
    Route("/", start),
    Route(ENTER, enter),
    Route("/links", links, methods=["POST"]),
]
