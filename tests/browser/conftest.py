"""One browser for all tests; each test has a context of its own, and fails on an error in the console."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browser import Served, served, unavailable
from tests.support.dashboards import sample_jobs
from tests.support.jobs_local import Place, jobs_in
from tests.support.patience import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

_EXPECTED = ("/live", "404", "/enter?token=used", "ERR_CONNECTION", "htmx:sendError", "htmx:afterRequest")
SignIn = Callable[..., "Page"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = unavailable()
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.browser)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Real jobs in a state folder of their own."""
    with jobs_in(tmp_path) as place:
        yield place


@pytest.fixture
def samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of jobs without processes; see `sample_jobs`."""
    for name, value in sample_jobs(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture
def dashboard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    """The dashboard over `place` or `samples`, whichever the test uses."""
    request.getfixturevalue("place" if "place" in request.fixturenames else "samples")
    with served(tmp_path) as server:
        yield server


@pytest.fixture
def sign_in(browser: "Browser") -> Iterator[SignIn]:
    """Opens a page of a dashboard with the newest link."""
    contexts: list[BrowserContext] = []
    errors: list[str] = []

    def open_page(dashboard: Served, **options: Any) -> "Page":
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        context.set_default_timeout(20_000 * PATIENCE)
        page = context.new_page()

        def note(message: Any) -> None:
            # Requests fail while the server is away, and pages that do not exist or are refused are looked at.
            text = f"{message.text} {message.location}"
            if message.type == "error" and not any(one in text for one in _EXPECTED):
                errors.append(message.text)

        page.on("console", note)
        page.on("pageerror", lambda error: errors.append(str(error)))
        if "storage_state" not in options:
            page.goto(dashboard.link)
            dashboard.next_link()
            page.wait_for_url(f"{dashboard.base}/jobs")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not errors
