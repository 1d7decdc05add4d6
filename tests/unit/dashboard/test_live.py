"""What open pages receive, and that nothing is looked at while none is open."""

import asyncio
import json
from pathlib import Path

import pytest

from safepoint.dashboard import live as live_module
from safepoint.dashboard.live import Live
from safepoint.dashboard.reading.places import Places
from safepoint.foundation import clock
from safepoint.jobs.local.history import History
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.states import JobState
from tests.support.dashboards import Sample, write_sample
from tests.support.patience import PATIENCE

RUNNING = Sample(name="tiny", state=JobState.RUNNING, step=30, num_points=30)


async def _until(stream: object, key: str) -> None:
    """Read a stream until it reports a change of this job."""

    async def read() -> None:
        async for part in stream:  # pyright: ignore
            data = part.partition(b"data: ")[2]
            if data and key in json.loads(data):
                return

    await asyncio.wait_for(read(), 20 * PATIENCE)


def test_every_page_receives_a_change(home: Path) -> None:
    """A state in the history, a report of a rank, a new job and a deleted one; to two pages at once."""
    write_sample(home, RUNNING)
    places = Places({"local": lambda actor: LocalJobs(actor=actor)})
    live = Live(places)

    async def watch() -> None:
        live.start(asyncio.get_running_loop())
        pages = [live.stream(), live.stream()]
        assert [b"event: hello" in await anext(page) for page in pages] == [True, True]
        await asyncio.sleep(1)  # until the first look, with which later ones are compared
        for change in (_report, _new_job, _state, _delete):
            change(home)
            await asyncio.gather(
                *(_until(page, f"local/{'new' if change is _new_job else 'tiny'}") for page in pages)
            )
        live.close()

    try:
        asyncio.run(watch())
    finally:
        live.close()
        places.close()


def _report(home: Path) -> None:
    with (job_folder("tiny") / "events.jsonl").open("a") as stream:
        stream.write('{"event": "saved", "time": "2026-01-01T00:00:00.000Z", "step": 30}\n')


def _new_job(home: Path) -> None:
    write_sample(home, Sample(name="new", state=JobState.CREATED, attempts=0))


def _state(home: Path) -> None:
    with History() as history:
        history.become("tiny", JobState.FAILED, actor="test")


def _delete(home: Path) -> None:
    with History() as history:
        history.forget("tiny")


def test_nothing_is_read_while_no_page_is_open(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first look, until a page is open."""
    write_sample(home, RUNNING)
    monkeypatch.setattr(live_module, "_ALIVE_EVERY_S", 0.05)
    places = Places({"local": lambda actor: LocalJobs(actor=actor)})
    reader = places.readers["local"]
    live = Live(places)

    async def idle() -> float:
        live.start(asyncio.get_running_loop())
        while "tiny" not in reader.read().jobs:
            await asyncio.sleep(0.05)
        before_s = reader.read().read_s
        await asyncio.sleep(1)  # nothing can be observed here but that nothing happens
        return reader._now.read_s - before_s

    try:
        assert asyncio.run(idle()) == 0
    finally:
        live.close()
        places.close()


def test_a_stream_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page opens another one, and that request is checked. A session of twelve hours has ended then."""
    monkeypatch.setattr(live_module, "_ALIVE_EVERY_S", 0.01)
    places = Places({})
    live = Live(places)
    now_s = clock.monotonic_s()
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s)

    async def read() -> list[bytes]:
        nonlocal now_s
        stream = live.stream()
        parts = [await anext(stream), await anext(stream)]
        now_s += 601
        return [*parts, *[part async for part in stream]]

    hello, *alive = asyncio.run(asyncio.wait_for(read(), 20 * PATIENCE))
    assert b"event: hello" in hello
    assert set(alive) == {b": alive\n\n"}
