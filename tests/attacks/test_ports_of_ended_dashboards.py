"""Another user takes the port of a dashboard that has ended, and answers the page that is still open in the browser.

The answer becomes a page at the address of the dashboard. When the dashboard has this address again, a script of that
page may read its pages and send its forms, with the cookie of the person. So the dashboard gets another port each
time.
"""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.cli.commands.dashboard import dashboard as command
from safepoint.dashboard import serving
from safepoint.dashboard.reading.room_view import known_locations
from safepoint.dashboard.settings import DashboardSettings
from tests.unit.dashboard.conftest import Dashboard, dashboard, home, start

__all__ = ["dashboard", "home", "start"]


def test_each_start_has_another_port() -> None:
    """If no port is chosen, the kernel chooses one. Both listen at the same time, so that the ports must differ."""
    assert inspect.signature(command).parameters["port"].default == 0
    listeners = [serving._listen(DashboardSettings()) for _ in range(2)]
    try:
        first, second = (one.getsockname()[1] for one in listeners)
    finally:
        for one in listeners:
            one.close()
    assert first != second
    assert 8765 not in {first, second}


@pytest.mark.parametrize("host", ["localhost:8765", "LocalHost:8765", "localhost"])
def test_a_link_for_another_person(host: str, start: Callable[..., Dashboard]) -> None:
    """A browser tries ::1 first for `localhost`. There, another user can listen at the same port."""
    served = start()
    served.visitor()
    cookie = f"{served.cookie}={served.client.cookies[served.cookie]}"
    headers = {"host": host, "cookie": cookie}
    assert "http://127.0.0.1:8765/enter?token=" in served.post("/links", {"role": "viewer"}, headers=headers).text


def test_the_location_of_a_job_of_a_cluster() -> None:
    """Its author may name a folder of the dashboard's machine, which a viewer may not see."""

    def reader(*, is_local: bool) -> Any:
        job = SimpleNamespace(job=SimpleNamespace())
        return SimpleNamespace(
            is_local=is_local,
            read=lambda: SimpleNamespace(jobs={"tiny": job}),
            call=lambda ask: ask(SimpleNamespace(output_of=lambda job: f"/{is_local}")),
        )

    places: Any = SimpleNamespace(readers={"local": reader(is_local=True), "prod": reader(is_local=False)})
    assert known_locations(places) == {"/True"}
