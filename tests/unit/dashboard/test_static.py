"""The files that come with the package: those of others are unchanged, and the archive for pods has none of them."""

import hashlib
import io
import re
import zipfile
from pathlib import Path

import safepoint.dashboard
import safepoint.presentation
from safepoint.jobs.cluster.pod_archive import build_archive
from tests.unit.dashboard.conftest import Dashboard

STATIC = Path(safepoint.dashboard.__file__).parent / "static"
SHARED = Path(safepoint.presentation.__file__).parent
VENDOR = STATIC / "vendor"


def test_files_of_others_are_as_they_were_published() -> None:
    """Each has the digest that the notice states, and lies beside its licence; no other file is there."""
    stated = dict(
        re.findall(r"^\| (\S+) \|.*\| ([0-9a-f]{64}) \|$", (VENDOR / "NOTICE.md").read_text(), re.MULTILINE)
    )
    found = {
        str(path.relative_to(VENDOR)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*")
        if path.is_file() and path.name != "NOTICE.md"
    }
    assert found == stated
    assert {
        folder.name for folder in VENDOR.iterdir() if folder.is_dir() and not (folder / "LICENSE").is_file()
    } == set()


def test_static_files_are_served_to_everyone(dashboard: Dashboard) -> None:
    """Only those in the folder, and without a session."""
    for path in (
        "dashboard.css",
        "dashboard.js",
        "icon.svg",
        "vendor/htmx/htmx.min.js",
        "vendor/uplot/uPlot.min.css",
    ):
        answer = dashboard.get(f"/static/{path}")
        assert (answer.status_code, answer.content) == (200, (STATIC / path).read_bytes())
    assert dashboard.get("/static/parts.css").content == (SHARED / "static" / "parts.css").read_bytes()
    for path in ("../application.py", "%2e%2e/application.py", "..%2fapplication.py", "/etc/passwd", ""):
        assert dashboard.get(f"/static/{path}").status_code in {404, 401, 405}


def test_nothing_is_loaded_from_elsewhere() -> None:
    """Neither by a page nor by the dashboard's own style and script."""
    templates = STATIC.parent / "templates"
    shared = [path for path in SHARED.rglob("*") if path.suffix in {".html", ".css"}]
    for path in (*templates.iterdir(), *shared, STATIC / "dashboard.css", STATIC / "dashboard.js"):
        assert not re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", path.read_text()), path


def test_the_archive_of_pods_has_no_dashboard() -> None:
    """Pods train; pages are shown elsewhere."""
    with zipfile.ZipFile(io.BytesIO(build_archive())) as archive:
        names = archive.namelist()
    assert not [name for name in names if "dashboard" in name or "presentation" in name or "notebook" in name]
    assert [name for name in names if "/answers/" in name] == [
        "safepoint/answers/__init__.py",
        "safepoint/answers/versions.py",
    ]
