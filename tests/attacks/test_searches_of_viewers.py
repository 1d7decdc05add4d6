"""A viewer searches in long outputs again and again, and does not wait for the answers: all others are served.

The server answers a limited number of requests at a time. A request goes on when its connection has ended.
"""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from safepoint.dashboard.access import guard as guard_module
from safepoint.dashboard.access.guard import Guard
from safepoint.dashboard.access.sessions import Role, Sessions, Visitor
from safepoint.dashboard.access.turns import Turns
from safepoint.dashboard.pages import checkpoints as checkpoints_page
from safepoint.dashboard.pages import context as context_module
from safepoint.dashboard.pages import job as page
from safepoint.dashboard.settings import DashboardSettings
from safepoint.errors import StorageError
from safepoint.foundation import clock
from safepoint.jobs.local.attempt.logs import read_logs
from safepoint.jobs.model.job_place import LogLine
from safepoint.jobs.model.states import JobState
from tests.support.dashboards import Sample, write_sample
from tests.support.patience import PATIENCE
from tests.unit.dashboard.conftest import Dashboard, dashboard, home, start

__all__ = ["dashboard", "home", "start"]


def test_a_session_waits_for_its_own_searches_only() -> None:
    """It has two turns of eight, whatever it requests. Nothing is kept of a session that has none."""

    async def visit() -> tuple[int, int]:
        turns, is_free, running = Turns(8, 2), asyncio.Event(), [0]

        async def search(session: str) -> None:
            async with turns.take(session):
                running[0] += 1
                await is_free.wait()

        tasks = [asyncio.create_task(search("viewer")) for _ in range(100)]
        await asyncio.sleep(0)
        of_viewer = running[0]
        tasks += [asyncio.create_task(search("operator"))]
        while running[0] == of_viewer:
            await asyncio.sleep(0)
        is_free.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 20 * PATIENCE)
        return of_viewer, len(turns._own)

    assert asyncio.run(visit()) == (2, 0)


@pytest.mark.parametrize("session", ["viewer", "operator"])
def test_requests_whose_connection_has_ended(session: str) -> None:
    """They count until they are answered, for their session; it can request again when one of them is answered."""
    sessions = Sessions(b"k" * 32, is_read_only=False)
    is_free = asyncio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        await is_free.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = Guard(wait, settings=DashboardSettings(port=1), sessions=sessions, cookie="c")
    statuses: list[int] = []

    async def request(name: str) -> None:
        cookie = sessions.cookie_of(Visitor(session=name, role=Role.VIEWER))
        headers = [(b"host", b"127.0.0.1"), (b"cookie", f"c={cookie}".encode())]
        scope = {"type": "http", "method": "GET", "path": "/jobs", "headers": headers}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await guard(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]

    async def visit() -> None:
        tasks = [asyncio.create_task(request("viewer")) for _ in range(guard_module._MOST_REQUESTS)]
        await asyncio.sleep(0)
        further = asyncio.create_task(request(session))
        for _ in range(5):
            await asyncio.sleep(0)
        assert statuses == ([429] if session == "viewer" else [])
        is_free.set()
        await asyncio.wait_for(asyncio.gather(*tasks, further), 20 * PATIENCE)
        await request("viewer")
        assert statuses.count(200) == len(tasks) + 1 + (session == "operator")
        assert not guard._running

    asyncio.run(visit())


def test_a_folder_that_is_never_read(home: Path, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of a job's folder does not answer. Its pages say so, and pages of other sessions are shown."""
    write_sample(home, Sample(name="tiny", state=JobState.SUSPENDED, step=30, steps=(10, 20)))
    monkeypatch.setattr(context_module, "_READ_WITHIN_S", 0.2)
    go_on = threading.Event()
    monkeypatch.setattr(checkpoints_page, "rows_of", lambda *_, **__: go_on.wait())
    dashboard.visitor(Role.VIEWER)
    try:
        for _ in range(40):
            answer = dashboard.get("/jobs/local/tiny/checkpoints")
            assert "a server may not answer" in answer.text
        assert dashboard.get("/jobs/local/tiny/checkpoints.json").status_code == 504
        dashboard.visitor(Role.OPERATOR)
        monkeypatch.setattr(context_module, "_READ_WITHIN_S", 20 * PATIENCE)
        assert dashboard.get("/jobs").status_code == 200
    finally:
        go_on.set()


def test_a_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in an output that has no end."""
    asked: list[int | None] = []
    now_s = 0.0

    class Reader:
        @contextmanager
        def open_jobs(self, actor: str) -> Iterator[Any]:
            yield self

        def logs(self, name: str, *, rank: int | None, node: int | None, last_bytes: int | None) -> Iterator[LogLine]:
            nonlocal now_s
            asked.append(last_bytes)
            while True:
                now_s += 1
                yield LogLine(source="rank 0", text="needle" if now_s == 3 else "hay")

    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s)
    reader: Any = Reader()
    lines, is_cut = page._tail(reader, "tiny", None, None, "needle", 200)
    assert ([line.text for line in lines], is_cut) == (["needle"], True)
    assert asked == [page._SEARCH_BYTES]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "link", "device"])
def test_an_output_that_is_no_file(kind: str, tmp_path: Path) -> None:
    """It is refused with its path. A pipe would be read for ever."""
    path = tmp_path / "logs" / "rank-0.log"
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/etc/passwd" if kind == "link" else "/dev/zero")
    for last_bytes in (None, 10):
        with pytest.raises(StorageError, match=r"rank-0\.log cannot be read: .*; nothing more was read"):
            list(read_logs(tmp_path, last_bytes=last_bytes))


@pytest.mark.timeout(60)
def test_an_output_of_a_terabyte(tmp_path: Path) -> None:
    """It takes no space on the disk, and would take an hour to read. Its end is searched."""
    folder = tmp_path / "logs"
    folder.mkdir()
    with (folder / "rank-0.log").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, 2)
        file.write(b"\nneedle\n")
    lines = [line.text for line in read_logs(tmp_path, last_bytes=page._SEARCH_BYTES)]
    assert lines[-1] == "needle"
