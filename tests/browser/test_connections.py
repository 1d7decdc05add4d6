"""What pages do when they are many, when the server is away, and when the clock of the viewer's computer is wrong."""

from pathlib import Path

from safepoint.jobs.local.history import History
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.states import JobState
from safepoint.progress.metric_history import METRICS_NAME, MetricPoint
from tests.browser.conftest import SignIn
from tests.support.browser import Served
from tests.support.dashboards import at

_ON, _OFF = "Live updates are on", "Live updates are off"


def test_more_pages_than_connections(samples: Path, dashboard: Served, sign_in: SignIn) -> None:
    """A browser opens six connections to a server. All pages are loaded and change, also when the first is closed."""
    first = sign_in(dashboard)
    pages = [first.context.new_page() for _ in range(8)]
    for page in pages:
        page.goto(f"{dashboard.base}/jobs/local/reward-model")
        page.get_by_role("img", name=_ON).wait_for()
    first.close()
    pages[0].close()
    for page in pages[1:]:
        page.get_by_role("img", name=_ON).wait_for()
    with History() as history:
        history.become("reward-model", JobState.FAILED, actor="test", message="seen by all")
    for page in pages[1:]:
        page.locator(".sentence", has_text="seen by all").wait_for()


def test_a_page_without_a_connection_says_so(samples: Path, dashboard: Served, sign_in: SignIn) -> None:
    """Since when, and what to do; its ages grow as if it were live. A page of the same browser says the same."""
    page = sign_in(dashboard)
    other = page.context.new_page()
    other.goto(f"{dashboard.base}/jobs/local/reward-model")
    for one in (page, other):
        one.get_by_role("img", name=_ON).wait_for()
        assert not one.locator("#lost").is_visible()
    dashboard.kill()
    for one in (page, other):
        one.locator("#lost", has_text="has had no connection to the dashboard").wait_for()
    dashboard.start()
    for one in (page, other):
        one.get_by_role("img", name=_ON).wait_for()
        one.locator("#lost").wait_for(state="hidden")


def test_an_answer_that_is_no_stream(samples: Path, dashboard: Served, sign_in: SignIn) -> None:
    """After a server error, a browser does not try again by itself. The page does."""
    page = sign_in(dashboard)
    page.get_by_role("img", name=_ON).wait_for()
    page.context.route("**/live", lambda route: route.fulfill(status=503))
    page.reload()
    page.get_by_role("img", name=_OFF).wait_for()
    page.locator("#lost").wait_for()
    page.context.unroute("**/live")
    page.get_by_role("img", name=_ON).wait_for()


def test_the_range_below_a_curve(samples: Path, dashboard: Served, sign_in: SignIn) -> None:
    """It changes with the curve."""
    page = sign_in(dashboard)
    page.goto(f"{dashboard.base}/jobs/local/llama-sft-8b")
    figure = page.locator('figure[data-metric="loss"]')
    figure.locator("canvas").wait_for()
    before = figure.locator(".range").inner_text()
    assert "step 1,240" in before
    point = MetricPoint(time=at(0), attempt=3, step=1241, values={"loss": 77.5})
    with (job_folder("llama-sft-8b") / METRICS_NAME).open("ab") as file:
        file.write(point.to_line())
    with History() as history:
        history.become("llama-sft-8b", JobState.RUNNING, actor="test", message="more")
    figure.locator(".range", has_text="step 1,241").wait_for()
    assert "to 77.5" in figure.locator(".range").inner_text()
    assert figure.locator("figcaption .num").inner_text() == "77.5"


def test_a_wrong_clock(samples: Path, dashboard: Served, sign_in: SignIn) -> None:
    """The save was two minutes ago, on a computer whose clock is an hour ahead and on one an hour behind."""
    state = sign_in(dashboard).context.storage_state()
    for hours in (1, -1):
        page = sign_in(dashboard, storage_state=state)
        page.add_init_script(f"const real = Date.now; Date.now = () => real() + {hours} * 3600000;")
        page.goto(f"{dashboard.base}/jobs/local/llama-sft-8b")
        page.get_by_role("img", name=_ON).wait_for()
        age = page.locator("dt", has_text="Last safe point").locator("xpath=..").locator("time")
        assert age.inner_text() in {"2 m ago", "3 m ago", "4 m ago"}
