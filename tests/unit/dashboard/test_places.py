"""Jobs of several places: a cluster beside this machine, and a place that cannot be reached."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from safepoint.dashboard.access.sessions import Role, Sessions, Visitor
from safepoint.dashboard.application import make_application
from safepoint.dashboard.reading import places as places_module
from safepoint.dashboard.settings import DashboardSettings
from safepoint.errors import ConflictError, NotFoundError, StorageError
from safepoint.jobs.cluster.state import ClusterJob
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.model.job_place import LogLine
from safepoint.jobs.model.receipts import Receipt
from safepoint.jobs.model.records import AttemptRecord, JobEvent
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import Progress, State
from tests.support.dashboards import Sample, at, write_sample
from tests.support.patience import PATIENCE
from tests.unit.dashboard.conftest import BASE


class Cluster:
    """The jobs of a namespace, without a cluster; a double of `ClusterJobs`."""

    def __init__(self) -> None:
        self.failure: str = ""
        self.step = 10
        self.actors: list[str] = []
        self.state = JobState.RUNNING
        self.receipt: Receipt | None = None
        self.details: dict[str, Any] = {"last_lines": [], "queue_place": None}
        self.can_post = True

    @contextlib.contextmanager
    def open(self, actor: str) -> Iterator[Any]:
        self.actors.append(actor)
        yield self

    def jobs(self) -> list[ClusterJob]:
        if self.failure:
            raise StorageError(self.failure, hint="log in again")
        progress = self._progress() if self.can_post else None
        return [
            ClusterJob(
                name="tiny",
                place="prod",
                namespace="team-a",
                state=self.state,
                message="",
                created=at(600),
                command="train.py",
                num_nodes=2,
                ranks_per_node=None,
                queue="gpus",
                output="pvc://ckpt/tiny",
                progress=progress,
                safe_step=5,
                attempt=1,
                exit_code=None,
                is_ours=True,
                uid="u",
                runtime="torch",
                pods=(),
                grace_s=30.0,
                attempts=(),
                receipt=self.receipt,
            )
        ]

    def _progress(self) -> Progress:
        return Progress(time=at(1), state=State.TRAINING, step=self.step, loss=1.0 / self.step, attempt=1)

    def details_of(self, job: ClusterJob) -> dict[str, Any]:
        return self.details

    def progress_in_log(self, job: ClusterJob) -> Progress | None:
        return self._progress()

    def job(self, name: str) -> ClusterJob:
        found = [job for job in self.jobs() if job.name == name]
        if not found:
            raise NotFoundError(f"there is no job {name!r}")
        return found[0]

    def progress_of(self, job: ClusterJob) -> Progress | None:
        return job.progress

    def output_of(self, job: ClusterJob) -> str | None:
        return job.output

    def attempts(self, name: str) -> list[AttemptRecord]:
        return [AttemptRecord(number=1, num_nodes=2, started=at(500))]

    def events(self, name: str) -> list[JobEvent]:
        return [JobEvent(time=at(9), name="Started", actor="kubelet", cause="pod", detail={"object": "tiny-0"})]

    def logs(self, name: str, *, rank: int | None = None, follow: bool = False) -> Iterator[LogLine]:
        yield LogLine(source="node 0", text="hello from a pod")

    def suspend(self, name: str, *, timeout_s: float | None = None) -> ClusterJob:
        if self.state is JobState.SUSPENDED:
            raise ConflictError("it is suspended")
        self.state = JobState.SUSPENDED
        self.receipt = Receipt(
            step=12,
            checkpoint="pvc://ckpt/tiny/checkpoint-12",
            digest="xxh3-128:ab",
            is_read=True,
            was_requested=True,
        )
        return replace(self.job(name), was_saved=True)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def client(home: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """An operator of a dashboard with this machine and a cluster whose name is no part of a path."""
    monkeypatch.setattr(places_module, "_FRESH_ON_CLUSTER_S", 0.0)
    monkeypatch.setattr(places_module, "_FRESH_S", 0.0)
    monkeypatch.setattr(places_module, "_BUSY_SHARE", 0.0)
    sessions = Sessions(b"k" * 32, is_read_only=False)
    openers: dict[str, Callable[[str], Any]] = {
        "local": lambda actor: LocalJobs(actor=actor),
        "prod/api:6443/me": cluster.open,
    }
    with TestClient(make_application(DashboardSettings(), openers, sessions), base_url=BASE) as client:
        visitor = Visitor(session="s", role=Role.OPERATOR)
        client.cookies.set("safepoint_8765", sessions.cookie_of(visitor))
        client.headers["x-form-token"] = sessions.form_token(visitor)
        yield client


PLACE = "prod-api-6443-me"


def test_jobs_of_all_places_are_listed(home: Path, client: TestClient) -> None:
    """Two jobs of one name are two jobs; the document names the place as the command does."""
    write_sample(home, Sample(name="tiny", state=JobState.COMPLETE, step=3))
    text = client.get("/jobs").text
    assert f'href="/jobs/{PLACE}/tiny"' in text
    assert 'href="/jobs/local/tiny"' in text
    assert "queue gpus" in text
    assert {one["place"] for one in client.get("/jobs.json").json()} == {"local", "prod/api:6443/me"}
    only = client.get(f"/jobs?place={PLACE}").text
    assert 'data-row="/jobs/local/tiny"' not in only


def test_a_job_of_a_cluster_has_a_page(client: TestClient, cluster: Cluster) -> None:
    """Its curves are what the dashboard has seen; its commands name the place."""
    for step in (10, 20, 30):
        cluster.step = step
        client.get("/jobs")
    text = client.get(f"/jobs/{PLACE}/tiny").text
    assert "safepoint status --on prod/api:6443/me tiny" in text
    assert 'data-metric="loss"' in text
    assert client.get(f"/jobs/{PLACE}/tiny/metrics").json()["steps"] == [10, 20, 30]
    assert "hello from a pod" in client.get(f"/jobs/{PLACE}/tiny/logs").text
    assert "tiny-0" in client.get(f"/jobs/{PLACE}/tiny/events").text
    checkpoints = client.get(f"/jobs/{PLACE}/tiny/checkpoints", headers={"hx-request": "true"})
    assert (checkpoints.status_code, "is in the cluster" in checkpoints.text) == (200, True)
    for path in ("/storage", "/costs", f"/jobs/{PLACE}/tiny/suspend"):
        assert client.get(path).status_code == 200


def test_what_only_status_shows_is_on_the_page(client: TestClient, cluster: Cluster) -> None:
    """The place in the queue, and how a failed job ended; the document has both, as the command's has."""
    text = client.get(f"/jobs/{PLACE}/tiny").text
    assert "wait in the queue" not in text
    assert "Last lines of the output" not in text
    cluster.state, cluster.details = JobState.QUEUED, {"last_lines": [], "queue_place": 3}
    assert "It is number 3 of the jobs that wait in the queue." in client.get(f"/jobs/{PLACE}/tiny").text
    assert client.get(f"/jobs/{PLACE}/tiny.json").json()["queue_place"] == 3
    cluster.state, cluster.details = JobState.FAILED, {"last_lines": ["a <b>", "ValueError: x"], "queue_place": None}
    text = client.get(f"/jobs/{PLACE}/tiny").text
    assert "Last lines of the output" in text
    assert "a &lt;b&gt;" in text
    assert "ValueError: x" in text
    document = client.get(f"/jobs/{PLACE}/tiny.json").json()
    assert (document["last_lines"], document["queue_place"]) == (["a <b>", "ValueError: x"], None)


def test_the_progress_of_a_job_that_cannot_post_it_is_that_of_its_output(
    client: TestClient, cluster: Cluster
) -> None:
    """As `safepoint status` shows it; a list does not read outputs."""
    cluster.can_post, cluster.step = False, 42
    assert client.get("/jobs.json").json()[-1]["progress"] is None
    assert client.get(f"/jobs/{PLACE}/tiny.json").json()["progress"]["step"] == 42
    assert ">42<" in client.get(f"/jobs/{PLACE}/tiny").text


def test_the_receipt_of_a_cluster_is_shown(client: TestClient) -> None:
    """As its pod has made it."""
    answer = client.post(f"/jobs/{PLACE}/tiny/suspend", follow_redirects=False)
    path = answer.headers["location"]
    number = path.rpartition("/")[2]
    import threading

    for thread in threading.enumerate():
        if thread.name == f"safepoint-action-{number}":
            thread.join(30 * PATIENCE)
    text = client.get(path).text
    assert "pvc://ckpt/tiny/checkpoint-12" in text
    assert "every file was read and matches its digest" in text
    assert client.get(f"{path}.json").json()["result"]["receipt"]["step"] == 12


def test_a_place_that_cannot_be_read_disturbs_no_other(home: Path, client: TestClient, cluster: Cluster) -> None:
    """Its message is on the page, and its jobs come back by themselves."""
    write_sample(home, Sample(name="here", state=JobState.COMPLETE, step=3))
    cluster.failure = "the API server does not answer"
    text = client.get("/jobs").text
    assert "the API server does not answer" in text
    assert 'href="/jobs/local/here"' in text
    assert client.get("/storage").status_code == client.get("/costs").status_code == 200
    assert "does not answer" in client.get(f"/jobs/{PLACE}/tiny").text
    cluster.failure = ""
    assert f'href="/jobs/{PLACE}/tiny"' in client.get("/jobs").text
