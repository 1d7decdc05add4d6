"""What every page has to be in a browser: as wide as its window, and without a violation that axe-core finds."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.browser import AXE_FILE

if TYPE_CHECKING:
    from playwright.sync_api import Page

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "small": {"color_scheme": "light", "viewport": {"width": 360, "height": 740}},
}


def look_at(page: "Page", name: str, look: str) -> list[str]:
    """The violations on a page. With SAFEPOINT_TEST_PICTURES, its picture is put in this folder, for a person.

    Args:
        name: of the page, for messages and the picture.
        look: one of `LOOKS`.
    """
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1], f"{name} is wider than the window: {widths}"
    if folder := os.environ.get("SAFEPOINT_TEST_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}-{look}.png", full_page=True)
    page.evaluate(AXE_FILE.read_text())  # a policy against inline scripts does not concern the debugger
    found = page.evaluate("axe.run().then(result => result.violations)")
    return [
        f"{name}, {look}: {one['id']}: {node['html'][:150]} ({node['failureSummary'][:200]})"
        for one in found
        for node in one["nodes"][:3]
    ]
