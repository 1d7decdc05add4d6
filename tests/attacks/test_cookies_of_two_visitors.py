"""A browser sends two cookies of the dashboard, or states an origin of another scheme.

For a browser, all ports of an address are one site. A viewer with a program at the same address can put a cookie
before the cookie of an operator: the operator would become a viewer, until the browser is closed.
"""

from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from safepoint.dashboard.access.guard import Guard
from safepoint.dashboard.access.sessions import Role, Sessions, Visitor
from safepoint.dashboard.settings import DashboardSettings

_SESSIONS = Sessions(b"k" * 32, is_read_only=False)


def client(**options: Path) -> TestClient:
    async def who(request: Request) -> PlainTextResponse:
        visitor = request.state.visitor
        return PlainTextResponse(f"{visitor.role} {visitor.session}")

    settings = DashboardSettings(**options)  # pyright: ignore[reportArgumentType]
    guard = Guard(Starlette(routes=[Route("/", who)]), settings=settings, sessions=_SESSIONS, cookie="own")
    scheme = "https" if settings.has_tls else "http"
    return TestClient(guard, base_url=f"{scheme}://127.0.0.1:8443")


def cookie(role: Role, session: str) -> str:
    return f"own={_SESSIONS.cookie_of(Visitor(session=session, role=role))}"


VIEWER, OPERATOR = cookie(Role.VIEWER, "theirs"), cookie(Role.OPERATOR, "mine")


@pytest.mark.parametrize(
    ("cookies", "found"),
    [
        ((VIEWER, OPERATOR), "operator mine"),
        ((OPERATOR, VIEWER), "operator mine"),
        (("own=nonsense", VIEWER, "own=", OPERATOR), "operator mine"),
        (("own=nonsense", VIEWER), "viewer theirs"),
    ],
)
def test_the_cookie_with_the_highest_rights_counts(cookies: tuple[str, ...], found: str) -> None:
    assert client().get("/", headers={"cookie": "; ".join(cookies)}).text == found


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://127.0.0.1:8443", 200),
        ("http://127.0.0.1:8443", 403),
        ("ftp://127.0.0.1:8443", 403),
        ("127.0.0.1:8443", 403),
        ("", 403),
    ],
)
def test_the_scheme_of_an_origin_counts(origin: str, status: int, tmp_path: Path) -> None:
    """With TLS, a page without TLS is a page of another program."""
    file = tmp_path / "tls.pem"
    file.touch(mode=0o600)
    with_tls = client(tls_certificate=file, tls_key=file)
    assert with_tls.get("/", headers={"cookie": OPERATOR, "origin": origin}).status_code == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [("https://127.0.0.1:8443", 200), ("http://127.0.0.1:8443", 200), ("ws://127.0.0.1:8443", 403)],
)
def test_a_proxy_may_add_tls(origin: str, status: int) -> None:
    assert client().get("/", headers={"cookie": OPERATOR, "origin": origin}).status_code == status
