"""The pictures of the dashboard's tour, from the sample jobs of the tests, in Debian's Chromium.

python -m tests.support.pictures [FOLDER]      # docs/pictures, if no folder is given
"""

import base64
import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.browser import Served, served, unavailable
from tests.support.dashboards import sample_jobs
from tests.support.looks import LOOKS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_ROOT = Path("/tmp/training")
"""The jobs save below this folder, and the pictures show its name."""
_WIDTH = 1160
_JOB = "/jobs/local/llama-sft-8b"
_PAGES = {
    "jobs": ("/jobs", "light", 800),
    "job": (_JOB, "dark", 1400),
    "suspend": (f"{_JOB}/suspend", "light", 560),
    "scale": (f"{_JOB}/scale", "light", 640),
    "delete": ("/jobs/local/reward-model/delete", "light", 540),
    "output": ("/jobs/local/dpo-beta-01/logs?rank=0", "dark", 640),
    "events": (f"{_JOB}/events", "light", 560),
    "checkpoints": ("/jobs/local/reward-model/checkpoints", "light", 450),
    "resume": ("/jobs/local/reward-model/resume?step=800", "light", 440),
    "storage": ("/storage", "light", 700),
    "costs": ("/costs", "light", 740),
}
"""For each picture: the page, its look, and its height in pixels."""
_SMALL = (f"{_JOB}/events", "/jobs/local/dpo-beta-01/logs?rank=0", f"{_JOB}/scale", "/jobs/local/reward-model/delete")


def _signed_in(browser: "Browser", dashboard: Served, **options: Any) -> "Page":
    page = browser.new_context(**options).new_page()
    page.goto(dashboard.link)
    dashboard.next_link()
    page.wait_for_url(f"{dashboard.base}/jobs")
    return page


def _shown(page: "Page", dashboard: Served, path: str) -> "Page":
    page.goto(f"{dashboard.base}{path}")
    page.wait_for_load_state("load")
    if path == _JOB:
        page.locator("#checkpoints table").wait_for()
        page.locator(".plot canvas").first.wait_for()
    page.wait_for_timeout(1000)  # the circle of the connection
    return page


def _side_by_side(browser: "Browser", pictures: list[bytes], path: Path) -> None:
    images = "".join(
        f'<img width="270" src="data:image/png;base64,{base64.b64encode(one).decode()}">' for one in pictures
    )
    page = browser.new_page(viewport={"width": _WIDTH, "height": 587})
    page.set_content(
        "<style>body{margin:16px;display:flex;gap:16px;background:#c8ccc6}"
        f"img{{border-radius:8px;height:555px;object-fit:cover;object-position:top}}</style>{images}"
    )
    page.screenshot(path=path)


def make_pictures(folder: Path) -> None:
    """Write the pictures of all pages into a folder."""
    from playwright.sync_api import sync_playwright

    _ROOT.mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, _ROOT)
        os.environ.update(sample_jobs(_ROOT))
        dashboard = stack.enter_context(served(_ROOT))
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        stack.callback(browser.close)
        for name, (path, look, height) in _PAGES.items():
            page = _signed_in(browser, dashboard, **LOOKS[look], viewport={"width": _WIDTH, "height": height})
            _shown(page, dashboard, path).screenshot(path=folder / f"dashboard-{name}.png")
        small = _signed_in(browser, dashboard, **LOOKS["small"], device_scale_factor=1)
        _side_by_side(
            browser, [_shown(small, dashboard, path).screenshot() for path in _SMALL], folder / "dashboard-small.png"
        )


if __name__ == "__main__":
    reason = unavailable()
    if reason is not None:
        sys.exit(f"no pictures: {reason}")
    make_pictures(Path(*sys.argv[1:]) if sys.argv[1:] else Path(__file__).parents[2] / "docs" / "pictures")
