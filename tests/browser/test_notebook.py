"""Cells of a notebook in a real browser, with JupyterLab's own style: in light, in dark, on a small screen."""

import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browser import AXE_FILE
from tests.support.hostile_texts import HOSTILE, write_hostile
from tests.support.notebook import executed, written
from tests.support.patience import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nbconvert") is None, reason="nbconvert not found; `make test-browser` installs it"
)
CELLS = (
    "from safepoint import LocalConfig, TrainerClient\nclient = TrainerClient(LocalConfig())",
    "client.list_jobs()",
    "client.get_job('llama-sft-8b')",
    "client.get_job('dpo-beta-01')",
    "client.watch_job('reward-model')",
    "client.suspend_job('reward-model')",
    "client.list_checkpoints('llama-sft-8b')",
)
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"theme": "light", "color_scheme": "dark", "width": 1180},
    "dark": {"theme": "dark", "color_scheme": "light", "width": 1180},
    "small": {"theme": "light", "color_scheme": "light", "width": 360},
}
"""The theme of the notebook differs from the system's, because a cell has to follow the notebook."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the pages of all tests here."""
    return tmp_path_factory.mktemp("pages")


def page_of(document: Any, folder: Path, theme: str) -> str:
    """The address of a page with the notebook, as `jupyter nbconvert` makes it."""
    from nbconvert import HTMLExporter

    html, _ = HTMLExporter(theme=theme).from_notebook_node(document)
    path = folder / f"{theme}.html"
    path.write_text(html)
    return f"file://{path}"


def opened(browser: "Browser", address: str, width: int = 1180, **options: Any) -> "tuple[Page, list[str]]":
    """The page, without any network, and the names of the dialogs that it has shown."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    context.set_default_timeout(20_000 * PATIENCE)
    context.route(re.compile("^(?!file:)"), lambda route: route.abort())
    page = context.new_page()
    dialogs: list[str] = []

    def note(dialog: Any) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", note)
    page.goto(address, wait_until="load")
    return page, dialogs


def test_cells_look_well(samples: Path, browser: "Browser", pages: Path) -> None:
    """Nothing overflows, axe-core finds nothing, and the colours are the notebook's.

    SAFEPOINT_TEST_PICTURES names a folder for the pictures, so that a person can look at them.
    """
    document = executed(written(samples / "jobs.ipynb", CELLS), samples, dict(os.environ))
    folder = os.environ.get("SAFEPOINT_TEST_PICTURES")
    violations: list[str] = []
    for name, look in LOOKS.items():
        address = page_of(document, pages, look["theme"])
        page, _ = opened(browser, address, look["width"], color_scheme=look["color_scheme"])
        widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1], f"{name} is wider than the window: {widths}"
        cells = page.locator(".safepoint")
        assert cells.count() == len(CELLS) - 1
        ground = cells.first.locator(".card").evaluate("one => getComputedStyle(one).backgroundColor")
        assert ground == ("rgb(28, 32, 36)" if name == "dark" else "rgb(255, 255, 255)")
        for number in range(cells.count()):
            inside = cells.nth(number).evaluate("one => [one.scrollWidth, one.clientWidth]")
            assert inside[0] <= inside[1], f"cell {number} of {name} is wider than its output: {inside}"
            if folder:
                cells.nth(number).screenshot(path=Path(folder) / f"cell-{number}-{name}.png")
        page.evaluate(AXE_FILE.read_text())
        found = page.evaluate("axe.run('.safepoint').then(result => result.violations)")
        violations += [
            f"{name}: {one['id']}: {node['html'][:150]} ({node['failureSummary'][:200]})"
            for one in found
            for node in one["nodes"][:3]
        ]
        page.context.close()
    assert not violations, "\n".join(violations)


def test_hostile_texts_stay_texts(
    samples: Path, browser: "Browser", pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In names of metrics, messages, events and manifests: no script runs, and no element is added."""
    states: list[str] = []
    elements = [text for text in HOSTILE if "<" in text or "on" in text]  # tests/unit/notebook has all texts
    for index, text in enumerate(elements):
        states.append(str(samples / f"state-{index}"))
        monkeypatch.setenv("XDG_STATE_HOME", states[-1])
        write_hostile(samples / str(index), text)
    cells = (
        f"import os\n{CELLS[0]}\nstates = {states!r}",
        "for state in states:\n"
        "    os.environ['XDG_STATE_HOME'] = state\n"
        "    client.watch_job('tiny')\n"
        "client.list_jobs()",
    )
    document = executed(written(samples / "hostile.ipynb", cells), samples, dict(os.environ))
    page, dialogs = opened(browser, page_of(document, pages, "light"))
    page.wait_for_timeout(500)  # an alert would come by then; there is nothing to wait for
    assert page.locator(".safepoint").count() == len(elements) + 1
    assert not dialogs
    strange = "script, img, iframe, a, form, link, base, meta, textarea, plaintext, object, [onload], [onerror]"
    assert page.locator(f".safepoint :is({strange})").count() == 0
    assert page.get_by_text("<script>alert(1)</script>").first.is_visible()
    page.context.close()
