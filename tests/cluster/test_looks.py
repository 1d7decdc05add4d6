"""The dashboard's pages for jobs of a real cluster, in a real browser."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.cluster.conftest import PLACE
from tests.cluster.test_dashboard import submit, trains_at
from tests.support.browser import unavailable
from tests.support.cluster.workspace import QUEUE, Workspace, apply, queue_objects
from tests.support.looks import LOOKS, look_at
from tests.support.visitor import Visitor

if TYPE_CHECKING:
    from playwright.sync_api import Page

JOB = f"/jobs/{PLACE}/tiny"


@contextlib.contextmanager
def _pages(visitor: Visitor) -> Iterator[dict[str, "Page"]]:
    """A page for each look, as the visitor."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        name, value = visitor.cookie.split("=", 1)
        pages: dict[str, Page] = {}
        for look, options in LOOKS.items():
            context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
            context.add_cookies([{"name": name, "value": value, "url": visitor.base}])
            pages[look] = context.new_page()
        yield pages
        browser.close()


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.timeout(900)
def test_every_page_looks_well(team: Workspace, visitor: Visitor) -> None:
    """Of a job that trains, of one that waits in a queue, and of the suspended job: no violation, no overflow."""
    apply(team.cluster, queue_objects(team.namespace, cpu="1"))
    queue = ("--queue", QUEUE, "--cpu", "1", "--memory", "1Gi", "--priority-class")
    with _pages(visitor) as pages:
        violations: list[str] = []

        def look(name: str, path: str) -> None:
            for how, page in pages.items():
                page.goto(f"{visitor.base}{path}")
                page.wait_for_load_state("load")
                violations.extend(look_at(page, f"cluster-{name}", how))

        slow = ("--epochs", "60", "--step-ms", "250")
        submit("tiny", *queue, "high", "--save-steps", "2", program=slow)
        visitor.wait(JOB, trains_at(4), 240)
        visitor.wait(JOB, lambda job: job["safe_step"] is not None)
        submit("second", *queue, "low")
        visitor.wait(f"/jobs/{PLACE}/second", lambda job: job["state"] == "Queued" and job["queue_place"] == 1)
        for name in ("events", "logs", "suspend", "scale", "delete", "checkpoints"):
            look(name, f"{JOB}/{name}")
        look("jobs", "/jobs")
        look("job", JOB)
        look("queued", f"/jobs/{PLACE}/second")
        look("storage", "/storage")
        look("costs", "/costs")
        visitor.act(f"{JOB}/checkpoints", f"{JOB}/checkpoints/read")
        look("checkpoints-read", f"{JOB}/checkpoints")
        visitor.act(f"{JOB}/suspend", f"{JOB}/suspend")
        look("suspended", JOB)
        look("resume", f"{JOB}/resume")
        assert not violations, "\n".join(violations)
    for name in ("second", "tiny"):
        visitor.act(f"/jobs/{PLACE}/{name}/delete", f"/jobs/{PLACE}/{name}/delete")
