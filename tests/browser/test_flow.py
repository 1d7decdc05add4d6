"""The life of a real job, as a person sees it in the browser."""

import re
import signal
from typing import TYPE_CHECKING

from safepoint.jobs.model.states import JobState
from tests.browser.conftest import SignIn
from tests.support.browser import Served
from tests.support.jobs_local import Place

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def _train(place: Place, name: str = "tiny", **fields: object) -> None:
    place.jobs.submit(place.training(name, "--save-steps", "2", "--epochs", "12", **fields))


def test_the_life_of_a_job(place: Place, dashboard: Served, sign_in: SignIn) -> None:
    """Submitted, seen live, suspended with its preview and receipt, a damaged checkpoint found, resumed, deleted."""
    page = sign_in(dashboard)
    page.get_by_role("heading", name="No jobs yet").wait_for()
    _train(place)
    page.get_by_role("link", name="tiny", exact=True).click()  # it appears by itself
    page.get_by_text("Trains: step").wait_for()
    place.wait_for_saved("tiny", 2)
    page.get_by_text(re.compile("the newest save is step [2-9]")).wait_for()
    page.get_by_role("img", name=re.compile("^steps_per_s from step")).wait_for()

    page.keyboard.press("p")
    page.get_by_role("heading", name="Suspend tiny?").wait_for()
    page.get_by_text(re.compile("it fits, and no step is lost")).wait_for()
    page.get_by_role("button", name="Suspend").click()
    page.get_by_role("heading", name="Done", exact=True).wait_for()  # the page changes by itself
    facts = page.locator(".facts").inner_text()
    job = place.jobs.job("tiny")
    assert (job.state, job.was_saved) == (JobState.SUSPENDED, True)
    assert f"Safe step\n{job.safe_step}" in facts
    assert re.search(r"Digest of its manifest\nxxh3-128:\w{32}", facts)

    page.goto(f"{dashboard.base}/jobs/local/tiny/checkpoints")
    newest = max(place.steps("tiny"))
    files = [path for path in (place.output("tiny") / f"checkpoint-{newest}").iterdir() if path.suffix != ".json"]
    max(files, key=lambda path: path.stat().st_size).write_bytes(b"damaged")
    page.reload()
    page.get_by_text("damaged").first.wait_for()
    page.get_by_role("button", name=f"Verify checkpoint-{newest}").click()
    page.get_by_role("heading", name="It is damaged").wait_for()
    page.get_by_text("is damaged:").wait_for()
    page.goto(f"{dashboard.base}/jobs/local/tiny/checkpoints")
    older = sorted(place.steps("tiny"))[-2]
    page.get_by_role("button", name=f"Verify checkpoint-{older}").click()
    page.get_by_text("match their digests").wait_for()

    page.goto(f"{dashboard.base}/jobs/local/tiny/checkpoints")
    page.get_by_text(re.compile("all files read .*, here")).wait_for()
    page.get_by_role("link", name=f"Resume from checkpoint-{older}").click()
    page.get_by_role("heading", name=f"Resume tiny from step {older}?").wait_for()
    page.get_by_text("1 newer checkpoint will be moved aside; nothing is deleted.").wait_for()
    page.get_by_role("button", name="Resume").click()
    page.get_by_text(f"The job resumes from step {older}.").wait_for()
    place.complete("tiny")
    assert place.events("tiny", "resumed")[-1]["step"] == older
    page.goto(f"{dashboard.base}/jobs/local/tiny")
    page.locator(".sentence", has_text="Finished at step").wait_for()

    page.get_by_role("link", name="Delete").first.click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_text("The job is deleted").wait_for()
    page.get_by_role("link", name="All jobs").click()
    page.get_by_role("heading", name="No jobs yet").wait_for()
    assert place.steps("tiny")  # its checkpoints stay


def test_a_job_is_scaled(place: Place, dashboard: Served, sign_in: SignIn) -> None:
    """From one node to two, from the page of the job."""
    _train(place)
    place.wait_for_saved("tiny", 2)
    page = sign_in(dashboard)
    page.goto(f"{dashboard.base}/jobs/local/tiny")
    page.get_by_role("link", name="Scale").click()
    page.get_by_label("Number of nodes").fill("2")
    page.get_by_role("button", name="Scale").click()
    page.get_by_text("The job has 2 nodes now").wait_for()
    assert place.jobs.job("tiny").num_nodes == 2
    page.goto(f"{dashboard.base}/jobs/local/tiny")
    page.get_by_text("2 nodes").first.wait_for()


def test_two_viewers_see_a_change_at_once(place: Place, dashboard: Served, sign_in: SignIn) -> None:
    """What one of them does, the other sees without loading the page again."""
    _train(place)
    place.wait_for_saved("tiny", 2)
    first, second = sign_in(dashboard), sign_in(dashboard)
    second.get_by_role("img", name="Live updates are on").wait_for()
    first.goto(f"{dashboard.base}/jobs/local/tiny/suspend")
    first.get_by_role("button", name="Suspend").click()
    second.get_by_text(re.compile("^(Suspending|Suspended)$")).first.wait_for()
    first.get_by_role("heading", name="Done", exact=True).wait_for()
    second.locator(".pill", has_text="Suspended").wait_for()


def test_a_page_outlives_the_server(place: Place, dashboard: Served, sign_in: SignIn) -> None:
    """While it is away, the page says so; after its start, the page is live again, without another link."""
    page = sign_in(dashboard)
    page.get_by_role("img", name="Live updates are on").wait_for()
    dashboard.kill()
    page.get_by_role("img", name="Live updates are off").wait_for()
    dashboard.start()
    page.get_by_role("img", name="Live updates are on").wait_for()
    _train(place)
    page.get_by_role("link", name="tiny", exact=True).wait_for()
    place.jobs.delete("tiny")
    assert dashboard.stop() == -signal.SIGTERM
    dashboard.start()


def _press(page: "Page", target: "Locator") -> None:
    """Move the focus to an element with the Tab key, and press Enter."""
    target.wait_for()
    for _ in range(100):
        if target.evaluate("one => one === document.activeElement"):
            page.keyboard.press("Enter")
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"the Tab key does not reach {target}")


def test_the_keyboard_is_enough(place: Place, dashboard: Served, sign_in: SignIn) -> None:
    """Search, choose, suspend, scale, verify, resume and delete without a pointer."""
    _train(place)
    place.wait_for_saved("tiny", 2)
    page = sign_in(dashboard)
    page.get_by_role("link", name="tiny", exact=True).wait_for()
    page.keyboard.press("/")
    page.keyboard.type("tiny")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{dashboard.base}/jobs?q=tiny")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{dashboard.base}/jobs/local/tiny")
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("p")
    page.get_by_role("heading", name="Suspend tiny?").wait_for()
    _press(page, page.get_by_role("button", name="Suspend"))
    page.get_by_role("heading", name="Done", exact=True).wait_for()
    assert place.jobs.job("tiny").state is JobState.SUSPENDED

    back = page.get_by_role("link", name="Back", exact=True)
    _press(page, back)
    _press(page, page.get_by_role("link", name="Scale"))
    number = page.get_by_label("Number of nodes")
    number.wait_for()
    while not number.evaluate("one => one === document.activeElement"):
        page.keyboard.press("Tab")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("2")
    _press(page, page.get_by_role("button", name="Scale"))
    page.get_by_text("The job has 2 nodes now").wait_for()

    _press(page, back)
    newest = max(place.steps("tiny"))
    _press(page, page.get_by_role("button", name=f"Verify checkpoint-{newest}"))
    page.get_by_text("match their digests").wait_for()
    _press(page, back)
    page.get_by_role("link", name="Resume", exact=True).first.wait_for()
    page.keyboard.press("r")
    page.get_by_role("heading", name="Resume tiny?").wait_for()
    _press(page, page.get_by_role("button", name="Resume"))
    page.get_by_text("The job resumes.").wait_for()

    _press(page, back)
    _press(page, page.get_by_role("link", name="Delete").first)
    _press(page, page.get_by_role("button", name="Delete"))
    page.get_by_text("The job is deleted").wait_for()
