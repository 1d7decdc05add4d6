"""Each page in light, in dark and on a small screen: nothing overflows, and axe-core finds no violation."""

import re
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from tests.browser.conftest import SignIn
from tests.support.browser import Served
from tests.support.looks import LOOKS, look_at

PAGES = {
    "jobs": "/jobs",
    "job": "/jobs/local/llama-sft-8b",
    "job-failed": "/jobs/local/dpo-beta-01",
    "job-queued": "/jobs/local/sweep-lr-3e-4",
    "events": "/jobs/local/llama-sft-8b/events",
    "output": "/jobs/local/dpo-beta-01/logs?rank=0",
    "suspend": "/jobs/local/llama-sft-8b/suspend",
    "scale": "/jobs/local/llama-sft-8b/scale",
    "delete": "/jobs/local/reward-model/delete",
    "resume": "/jobs/local/reward-model/resume?step=800",
    "checkpoints": "/jobs/local/llama-sft-8b/checkpoints",
    "location": "/checkpoints",
    "storage": "/storage",
    "costs": "/costs",
    "missing": "/jobs/local/nothing",
    "refused": "/enter?token=used",
}


@pytest.mark.parametrize("look", LOOKS)
def test_every_page_looks_well(samples: Path, dashboard: Served, sign_in: SignIn, look: str) -> None:
    page = sign_in(dashboard, **LOOKS[look])
    violations: list[str] = []
    output = samples / "out" / "llama-sft-8b"
    for name, path in {**PAGES, "any-location": f"/checkpoints?location={output}"}.items():
        page.goto(f"{dashboard.base}{path}")
        page.wait_for_load_state("load")
        if name == "job":
            page.locator("#checkpoints table").wait_for()
            page.locator(".plot canvas").first.wait_for()
        if name == "checkpoints":
            page.get_by_label("Copy or export checkpoint-1200").click()
        if name in {"missing", "refused"}:
            page.get_by_text("404" if name == "missing" else "401").wait_for()
        violations += look_at(page, name, look)
    page.goto(f"{dashboard.base}{PAGES['resume']}")
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("The job resumes from step 800.").wait_for()
    violations += look_at(page, "done", look)
    page.get_by_role("button", name="Link for a viewer").click()
    page.get_by_role("heading", name="A link for a viewer").wait_for()
    violations += look_at(page, "link", look)
    page.get_by_role("link", name="Jobs", exact=True).click()
    page.get_by_role("button", name="Keyboard shortcuts").click()
    page.get_by_role("dialog").wait_for()
    violations += look_at(page, "keys", look)
    assert not violations, "\n".join(violations)


def test_pages_can_be_read_without_a_script(samples: Path, dashboard: Served, sign_in: SignIn) -> None:
    """Curves are pictures, ages are texts, and links lead to what a script would load."""
    state = sign_in(dashboard).context.storage_state()
    page = sign_in(dashboard, java_script_enabled=False, storage_state=state)
    page.goto(f"{dashboard.base}/jobs")
    page.get_by_role("link", name="llama-sft-8b", exact=True).click()
    assert page.get_by_role("img", name="loss from step 1").is_visible()
    page.get_by_role("link", name="Show the checkpoints").click()
    assert page.get_by_text("checkpoint-1200").first.is_visible()
    page.goto(f"{dashboard.base}/jobs/local/llama-sft-8b/suspend")
    assert page.get_by_role("button", name="Suspend anyway").is_visible()


def test_times_are_those_of_the_viewer(samples: Path, dashboard: Served, sign_in: SignIn) -> None:
    """In their zone, with the exact time on hover; without a script, in UTC."""
    page = sign_in(dashboard, timezone_id="Asia/Tokyo", locale="en-GB")
    page.goto(f"{dashboard.base}/jobs/local/llama-sft-8b/events")
    shown = page.locator("time[data-exact]").last
    written = datetime.fromisoformat(str(shown.get_attribute("datetime")))
    local = written.astimezone(ZoneInfo("Asia/Tokyo"))
    assert shown.inner_text() == local.strftime("%d/%m, %H:%M:%S")
    title = str(shown.get_attribute("title"))
    assert local.strftime("%H:%M:%S") in title
    assert re.search("GMT\\+9|JST", title)


def test_nothing_moves_for_those_who_do_not_want_it(samples: Path, dashboard: Served, sign_in: SignIn) -> None:
    """What moves otherwise is at rest."""
    for wish, expected in (("no-preference", True), ("reduce", False)):
        page = sign_in(dashboard, reduced_motion=wish)
        script = "[...document.querySelectorAll('*')].map(one => getComputedStyle(one))"
        moves = page.evaluate(
            f"{script}.some(one => one.transitionDuration !== '0s' || one.animationName !== 'none')"
        )
        assert moves == expected
