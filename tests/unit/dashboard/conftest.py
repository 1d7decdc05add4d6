"""A dashboard in this process, over the folders of jobs that a test writes."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from safepoint.dashboard.access.sessions import Role, Sessions, Visitor
from safepoint.dashboard.application import make_application
from safepoint.dashboard.settings import DashboardSettings
from safepoint.jobs.local.local_jobs import LocalJobs
from tests.support.own_home import home

__all__ = ["dashboard", "home", "start"]

BASE = "http://127.0.0.1:8765"


@dataclass
class Dashboard:
    """A dashboard, and clients of it."""

    root: Path
    sessions: Sessions
    client: TestClient
    cookie: str = "safepoint_8765"
    used: list[str] = field(default_factory=list)

    def visitor(self, role: Role = Role.OPERATOR) -> Visitor:
        visitor = Visitor(session=f"session of {role}".replace(" ", "-"), role=role)
        self.client.cookies.set(self.cookie, self.sessions.cookie_of(visitor))
        return visitor

    def leave(self) -> None:
        self.client.cookies.clear()

    def get(self, path: str, **arguments: Any) -> Any:
        return self.client.get(path, **arguments)

    def post(
        self, path: str, data: dict[str, str] | None = None, role: Role = Role.OPERATOR, **arguments: Any
    ) -> Any:
        token = self.sessions.form_token(self.visitor(role))
        return self.client.post(path, data={"form_token": token, **(data or {})}, follow_redirects=False, **arguments)


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., Dashboard]]:
    """Starts a dashboard with the given settings."""
    with contextlib.ExitStack() as stack:

        def begin(*, peer: str = "127.0.0.1", **fields: Any) -> Dashboard:
            settings = DashboardSettings(**{"port": 8765, **fields})
            sessions = Sessions(b"k" * 32, is_read_only=settings.is_read_only)
            used: list[str] = []
            application = make_application(
                settings, {"local": lambda actor: LocalJobs(actor=actor)}, sessions, link_used=used.append
            )
            client = stack.enter_context(TestClient(application, base_url=BASE, client=(peer, 50000)))
            return Dashboard(root=home, sessions=sessions, client=client, used=used)

        yield begin


@pytest.fixture
def dashboard(start: Callable[..., Dashboard]) -> Dashboard:
    """A dashboard with the default settings."""
    return start()
