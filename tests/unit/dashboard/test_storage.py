"""The page of storage: what is stored in object stores, against the sizes that the configuration gives."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from safepoint.dashboard.reading import bucket_usage, room_view
from safepoint.dashboard.reading.bucket_usage import BucketUsage, Usage, usage_in
from safepoint.dashboard.settings import bucket_sizes
from safepoint.errors import AccessDeniedError, UsageError
from safepoint.foundation import clock
from safepoint.jobs.local.history import History
from safepoint.jobs.model.states import JobState
from safepoint.storage.object_store import ObjectStore
from safepoint.storage.store import StoredObject
from tests.support.job_values import job_spec
from tests.support.patience import PATIENCE
from tests.unit.dashboard.conftest import Dashboard

GB, DAY_S, HOUR_S = 10**9, 86_400.0, 3600.0
NOW_S = 1_800_000_000.0


def objects(*ages_s: float, size_bytes: int = GB) -> Iterator[StoredObject]:
    for index, age_s in enumerate(ages_s):
        yield StoredObject(key=str(index), size_bytes=size_bytes, version="", modified_s=NOW_S - age_s)


def test_growth_is_what_the_last_day_has_added() -> None:
    """What is older only counts as stored. A pace is measured over an hour at least, and over a day at most."""
    assert usage_in([], now_s=NOW_S) == Usage()
    old = usage_in(objects(9 * DAY_S, 2 * DAY_S), now_s=NOW_S)
    assert old == Usage(stored_bytes=2 * GB)
    found = usage_in(objects(9 * DAY_S, 6 * HOUR_S, 3 * HOUR_S), now_s=NOW_S)
    assert (found.stored_bytes, found.growth_bytes_s) == (3 * GB, 2 * GB / (6 * HOUR_S))
    for age_s in (60.0, -600.0):  # the clock of a store may be ahead
        assert usage_in(objects(age_s), now_s=NOW_S).growth_bytes_s == GB / HOUR_S


def test_a_listing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the limit, the sum is a part, and no pace is computed from it."""
    monkeypatch.setattr(bucket_usage, "_MOST_OBJECTS", 2)
    assert usage_in(objects(60.0, 50.0), now_s=NOW_S).is_part is False
    assert usage_in(objects(60.0, 50.0, 40.0), now_s=NOW_S) == Usage(stored_bytes=2 * GB, is_part=True)


class Store:
    """Opens a store; a double."""

    def __init__(self, *found: StoredObject) -> None:
        self.found = found
        self.num_listings = 0
        self.begun = threading.Semaphore(0)
        self.failure: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()

    def open(self) -> ObjectStore:
        store = ObjectStore.__new__(ObjectStore)
        cast("Any", store).unsorted = self.unsorted
        return store

    def unsorted(self, *, deadline_s: float) -> Iterator[StoredObject]:
        self.num_listings += 1
        self.begun.release()
        self.answers.wait(30 * PATIENCE)
        if self.failure is not None:
            raise self.failure
        yield from self.found


def test_a_location_is_listed_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, and while it is listed, what is known is returned at once."""
    now = [1000.0]
    monkeypatch.setattr(clock, "monotonic_s", lambda: now[0])
    store, changes = Store(*objects(60.0)), list[str]()
    usage = BucketUsage(lambda: changes.append("storage"))
    store.answers.clear()
    assert usage.look({"a": store.open}) == {}
    store.answers.set()
    for _ in range(2):
        assert usage.look({"a": store.open}, wait_s=30 * PATIENCE)["a"].stored_bytes == GB
    assert (store.num_listings, changes) == (1, ["storage"])
    now[0] += 31
    store.answers.clear()
    assert usage.look({"a": store.open})["a"].stored_bytes == GB
    assert all(store.begun.acquire(timeout=30 * PATIENCE) for _ in range(2))
    store.answers.set()
    assert usage.look({"b": store.open}, wait_s=30 * PATIENCE).keys() <= {"b"}  # `a` is no longer wanted


def test_a_location_that_cannot_be_listed_says_why() -> None:
    """The others are listed, also those that are wanted meanwhile."""
    bad, good, worse = Store(), Store(*objects(60.0)), Store()
    bad.failure, worse.failure = AccessDeniedError("the key is not valid"), RuntimeError("a bug")
    bad.answers.clear()
    usage = BucketUsage(lambda: None)
    assert usage.look({"bad": bad.open}) == {}
    assert usage.look({"bad": bad.open, "worse": worse.open, "good": good.open}) == {}
    bad.answers.set()
    found = usage.look({"bad": bad.open, "worse": worse.open, "good": good.open}, wait_s=30 * PATIENCE)
    assert (found["bad"].failure, found["good"].stored_bytes) == ("the key is not valid", GB)
    assert found["worse"].failure == "RuntimeError: a bug"


@pytest.fixture
def jobs(home: Path) -> Path:
    """Two jobs of this machine, in one bucket."""
    with History() as history:
        for name in ("one", "two"):
            output = f"s3://models/team/{name}"
            history.add(job_spec(name, output_dir=output, working_dir=str(home)), actor="test")
    return home


def test_what_is_stored_in_a_bucket(
    jobs: Path, start: Callable[..., Dashboard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes and growth for each location; and for a location with a size, how full it is, and until when not."""
    stores = {name: Store(*objects(5 * DAY_S, 10 * HOUR_S)) for name in ("team", "one", "two")}
    stores["two"].failure = AccessDeniedError("the key is not valid")
    monkeypatch.setattr(clock, "wall_s", lambda: NOW_S)

    class Opened:
        def __init__(self, spec: Any, output: str) -> None:
            self.store = stores[output.rpartition("/")[2]].open()

    monkeypatch.setattr(room_view, "open_output", Opened)
    dashboard = start(bucket_sizes={"s3://models/team": 5 * GB})
    dashboard.visitor()
    rooms = {one["location"]: one for one in dashboard.get("/storage.json").json()}
    assert rooms["s3://models/team/one"]["stored_bytes"] == 2 * GB
    assert rooms["s3://models/team/one"]["free_bytes"] is None
    assert rooms["s3://models/team/two"]["missing"] == "the key is not valid"
    team = rooms["s3://models/team"]
    assert (team["stored_bytes"], team["free_bytes"], team["used_share"]) == (2 * GB, 3 * GB, 0.4)
    assert team["remaining_s"] == pytest.approx(3 * 10 * HOUR_S)
    assert {one["name"] for one in team["jobs"]} == {"one", "two"}
    text = dashboard.get("/storage").text
    assert "up to 2.4 GB a day" in text
    assert "30 h 00 m at the earliest" in text
    assert "40 % of 5.0 GB" in text
    assert "not known: the key is not valid" in text


def test_many_locations(home: Path, start: Callable[..., Dashboard], monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs of a location are counted, also those without a name here; one with a size is always listed."""
    with History() as history:
        for number in range(30):
            output = "s3://models/team" if number < 25 else f"s3://models/{number}"
            history.add(job_spec(f"job-{number}", output_dir=output, working_dir=str(home)), actor="test")
    monkeypatch.setattr(room_view, "_MOST_BUCKETS", 3)
    monkeypatch.setattr(room_view, "_opener", lambda places, key, jobs: Store().open)
    dashboard = start(bucket_sizes={"s3://models/team": 5 * GB})
    dashboard.visitor()
    rooms = {one["location"]: one for one in dashboard.get("/storage.json").json()}
    team = rooms["s3://models/team"]
    assert (team["num_jobs"], len(team["jobs"]), team["jobs"][0]["name"]) == (25, 20, "job-24")
    assert team["stored_bytes"] == 0
    assert "and 21 more" in dashboard.get("/storage").text
    assert "left out" not in dashboard.get("/storage").text
    monkeypatch.setattr(room_view, "MOST_FOLDERS", 4)
    assert "2 older locations are left out" in dashboard.get("/storage").text


def test_a_full_bucket_needs_attention(
    jobs: Path, start: Callable[..., Dashboard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the jobs that write there, those that run or wait. It is counted without a visit to the page Storage."""
    with History() as history:
        history.add(job_spec("other", output_dir="s3://models/teams", working_dir=str(jobs)), actor="test")
        history.become("two", JobState.COMPLETE, actor="test")
    team = Store(*objects(5 * DAY_S, 10 * HOUR_S))
    monkeypatch.setattr(room_view, "_opener", lambda places, key, jobs: team.open)

    def page(size_bytes: int) -> str:
        dashboard = start(bucket_sizes={"s3://models/team": size_bytes})
        dashboard.visitor()
        dashboard.get("/jobs")
        usage = dashboard.client.app.state.context.usage  # pyright: ignore
        assert usage._work.is_done(30 * PATIENCE)
        text = dashboard.get("/jobs?state=attention").text
        assert (problem in text) == (problem in dashboard.get("/jobs/local/one").text.replace("<wbr>", ""))
        return text

    problem = "location s3://models/team has no room for the next save"
    full = page(2 * GB)
    assert full.count(problem) == 1
    assert 'href="/jobs/local/one"' in full
    assert "No job matches" in page(2 * GB + 1)


def test_a_size_has_a_location_in_an_object_store() -> None:
    assert bucket_sizes(["S3://models/team/=2T", "az://c=1Gi"]) == {"s3://models/team": 2 * 10**12, "az://c": 1 << 30}
    for text in ("s3://models", "s3://models=", "=2T", "s3://models=much", "2T", "/data=2T", "pvc://claim=2T"):
        with pytest.raises(UsageError, match="nothing was started"):
            bucket_sizes([text])
