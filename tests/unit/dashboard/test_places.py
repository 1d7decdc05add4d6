"""Jobs of several places: a cluster beside this machine, and a place that cannot be reached."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from safepoint.checkpoint.tools.documents import list_document
from safepoint.checkpoint.tools.inventory import Inventory, open_inventory
from safepoint.dashboard.access.sessions import Role, Sessions, Visitor
from safepoint.dashboard.application import make_application
from safepoint.dashboard.reading import places as places_module
from safepoint.dashboard.settings import DashboardSettings
from safepoint.errors import ConflictError, NotFoundError, StorageError
from safepoint.jobs.cluster.pods.pod_summary import PodSummary
from safepoint.jobs.cluster.records.pod_image import PodImage
from safepoint.jobs.cluster.state import ClusterJob
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.model.job_place import LogLine
from safepoint.jobs.model.receipts import Receipt
from safepoint.jobs.model.records import AttemptRecord, JobEvent
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import OUTPUT_FOLDER, Progress, SpaceRecord, State
from tests.support.checkpoints import commit, prepared
from tests.support.cluster.kept import IMAGE_OF_POD
from tests.support.dashboards import Sample, at, write_sample
from tests.support.hostile_texts import HOSTILE, Tags
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
        self.fields: dict[str, Any] = {}
        self.inventory: Inventory | None = None
        self.in_pod: list[dict[str, Any]] = []
        self.asked_bytes: list[int | None] = []
        self.asked_nodes: list[int | None] = []
        self.memory: dict[str, Any] = {"pods": {}, "missing": "the cluster has no metrics API"}
        self.text = "CUDA <out> of memory"
        """A text that strangers have written."""
        self.is_held = threading.Event()
        self.is_held.set()

    @contextlib.contextmanager
    def open(self, actor: str) -> Iterator[Any]:
        self.actors.append(actor)
        yield self

    def jobs(self) -> list[ClusterJob]:
        fields, _ = {**self.fields}, self.is_held.wait(30 * PATIENCE)
        if self.failure:
            raise StorageError(self.failure, hint="log in again")
        progress = self._progress()
        return [
            ClusterJob(**{**self._usual(progress), **fields}),
        ]

    def _usual(self, progress: Progress) -> dict[str, Any]:
        return {
            "name": "tiny",
            "place": "prod",
            "namespace": "team-a",
            "state": self.state,
            "message": "",
            "created": at(600),
            "command": "train.py",
            "num_nodes": 2,
            "ranks_per_node": None,
            "queue": "gpus",
            "output": "pvc://ckpt/tiny",
            "progress": progress,
            "safe_step": 5,
            "attempt": 1,
            "exit_code": None,
            "is_ours": True,
            "uid": "u",
            "runtime": "torch",
            "pods": (
                PodSummary(name="tiny-node-0-0-abcde", node=0, phase="Running", machine="worker-7", restarts=2),
            ),
            "grace_s": 30.0,
            "attempts": (),
            "receipt": self.receipt,
        }

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
        if self.state is JobState.SUSPENDED:
            return []
        return [AttemptRecord(number=1, num_nodes=2, started=at(500))]

    def events(self, name: str) -> list[JobEvent]:
        detail = {"object": "tiny-0"}
        return [
            JobEvent(time=at(9), name="Started", actor="kubelet", cause="pod", detail=detail),
            JobEvent(time=self.text, name=self.text, actor=self.text, cause=self.text, detail={"object": self.text}),
        ]

    def logs(
        self,
        name: str,
        *,
        rank: int | None = None,
        node: int | None = None,
        follow: bool = False,
        last_bytes: int | None = None,
    ) -> Iterator[LogLine]:
        self.asked_bytes.append(last_bytes)
        self.asked_nodes.append(node)
        if not self.job(name).pods:
            raise NotFoundError("the job is Suspended and has no pods now")
        yield LogLine(source="node 0", text="hello from a pod")
        yield LogLine(source=self.text, text=self.text)

    def details_of(self, job: ClusterJob) -> dict[str, Any]:
        is_failed = job.state is JobState.FAILED
        return {"last_lines": [self.text] if is_failed else [], "queue_place": 3, "memory": self.memory}

    def progress_in_log(self, job: ClusterJob) -> Progress | None:
        return self._progress()

    def _progress(self) -> Progress:
        return Progress(time=at(1), state=State.TRAINING, step=self.step, loss=1.0 / self.step, attempt=1)

    def inventory_of(self, name: str) -> Inventory | None:
        return self.inventory

    def checkpoints_in_pod(self, name: str) -> list[dict[str, Any]]:
        return self.in_pod

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
    for limit in ("_FRESH_ON_CLUSTER_S", "_OLDEST_ON_CLUSTER_S"):
        monkeypatch.setattr(places_module, limit, 0.0)
    monkeypatch.setattr(places_module, "_FRESH_S", 0.0)
    monkeypatch.setattr(places_module, "_BUSY_SHARE", 0.0)
    sessions = Sessions(b"k" * 32, is_read_only=False)
    openers: dict[str, Callable[[str], Any]] = {
        "local": lambda actor: LocalJobs(actor=actor),
        "prod/api:6443/me": cluster.open,
    }
    with TestClient(make_application(DashboardSettings(port=8765), openers, sessions), base_url=BASE) as client:
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
    assert "prod/api:6443/me/team-a · 2 nodes" in text
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
    assert "worker-7" in text
    for path in ("/storage", "/costs", f"/jobs/{PLACE}/tiny/suspend"):
        assert client.get(path).status_code == 200


def test_a_job_of_a_cluster_has_a_process_image(client: TestClient, cluster: Cluster) -> None:
    """The page says how large it is, and whether it is newer than the checkpoint; so does the page of a resume."""
    image = PodImage(**{**IMAGE_OF_POD, "path": "pvc://data/tiny/images/image-1", "needs": ()})
    cluster.state, cluster.fields = JobState.SUSPENDED, {"image": image, "safe_step": 4}
    text = client.get(f"/jobs/{PLACE}/tiny").text
    assert re.search(r"process image</dt><dd>pvc://data/tiny/images/image-1, \d+ . old, 10 B, newer than", text)
    assert "continues from pvc://data/tiny/images/image-1" in client.get(f"/jobs/{PLACE}/tiny/resume").text
    cluster.fields = {"image": image, "safe_step": 5}
    assert "older than step 5" in client.get(f"/jobs/{PLACE}/tiny").text
    assert "from its newest checkpoint, step 5" in client.get(f"/jobs/{PLACE}/tiny/resume").text


def test_why_a_job_of_a_cluster_waits_or_failed(client: TestClient, cluster: Cluster) -> None:
    """Its place in the queue, and the last lines of the pod that failed first; the same is in the document."""
    cluster.state, cluster.fields = JobState.QUEUED, {"progress": None, "message": "quota for gpu", "command": ""}
    text = client.get(f"/jobs/{PLACE}/tiny").text
    assert "Waits: quota for gpu; number 3 in the queue." in text
    assert "not submitted by Safepoint" in text
    assert client.get(f"/jobs/{PLACE}/tiny.json").json()["queue_place"] == 3
    cluster.state, cluster.fields = JobState.FAILED, {}
    text = client.get(f"/jobs/{PLACE}/tiny").text
    assert "Last lines of the output" in text
    assert "CUDA &lt;out&gt; of memory" in text
    assert client.get(f"/jobs/{PLACE}/tiny.json").json()["last_lines"] == ["CUDA <out> of memory"]
    assert f'href="/jobs/{PLACE}/tiny/resume"' not in text  # on a cluster, it is submitted again


def test_the_progress_of_a_job_that_cannot_post_it_is_that_of_its_output(
    client: TestClient, cluster: Cluster
) -> None:
    """As `safepoint status` shows it; a list does not read outputs."""
    cluster.fields, cluster.step = {"progress": None}, 42
    assert client.get("/jobs.json").json()[-1]["progress"] is None
    assert client.get(f"/jobs/{PLACE}/tiny.json").json()["progress"]["step"] == 42
    assert ">42<" in client.get(f"/jobs/{PLACE}/tiny").text


def test_the_end_of_the_output_is_enough(client: TestClient, cluster: Cluster) -> None:
    """A search reads more of it. A job without pods has no output, and its page says why."""
    client.get(f"/jobs/{PLACE}/tiny/logs")
    client.get(f"/jobs/{PLACE}/tiny/logs?q=hello")
    assert cluster.asked_bytes == [256 << 10, 64 << 20]
    cluster.fields = {"pods": ()}
    page = client.get(f"/jobs/{PLACE}/tiny/logs", headers={"hx-request": "true"})
    assert (page.status_code, "The job is Suspended and has no pods now." in page.text) == (200, True)
    assert client.get(f"/jobs/{PLACE}/tiny/logs.json").status_code == 404


def test_a_pod_has_its_memory_and_its_output(client: TestClient, cluster: Cluster) -> None:
    """The memory of its container, or why it is not known; and the output of this pod alone."""
    text = client.get(f"/jobs/{PLACE}/tiny").text
    assert "How much memory the pods use is not known: the cluster has no metrics API." in text
    assert f'href="/jobs/{PLACE}/tiny/logs?node=0"' in text
    cluster.memory = {"pods": {"tiny-node-0-0-abcde": 3_000_000_000}, "missing": ""}
    text = client.get(f"/jobs/{PLACE}/tiny").text
    assert '3.0 GB<span class="sub">no limit</span>' in text
    assert "is not known" not in text
    assert client.get(f"/jobs/{PLACE}/tiny.json").json()["memory"] == cluster.memory
    text = client.get(f"/jobs/{PLACE}/tiny/logs?node=0").text
    assert cluster.asked_nodes[-1] == 0
    assert '<option value="0" selected>node 0</option>' in text
    assert client.get(f"/jobs/{PLACE}/tiny/logs?node=x").status_code == 400


def test_checkpoints_in_a_claim_are_read_in_a_pod(client: TestClient, cluster: Cluster, tmp_path: Path) -> None:
    """Only when an operator requests it; the table then shows them without actions."""
    for step in (10, 20):
        commit(prepared(tmp_path / "claim"), step)
    items = open_inventory(str(tmp_path / "claim"))[0].items()
    cluster.in_pod = [list_document(item, item.faults, deep=False) for item in items]
    cluster.in_pod.append({**cluster.in_pod[0], "kind": "of a later release"})
    path = f"/jobs/{PLACE}/tiny/checkpoints"
    before = client.get(path, headers={"hx-request": "true"})
    assert (before.status_code, "can be read only in the cluster" in before.text) == (200, True)
    assert client.get(f"{path}.json").status_code == 501
    assert finished(client, client.post(f"{path}/read", follow_redirects=False))["state"] == "done"
    after = client.get(path).text
    assert "checkpoint-20" in after
    assert "checkpoint-10" in after
    assert "As a pod has read them" in after
    assert "Read them in a pod again" in after
    assert "Verify checkpoint" not in after
    names = [one["name"] for one in client.get(f"{path}.json").json()]
    assert names == ["checkpoint-20", "checkpoint-10"]
    write_sample(tmp_path, Sample(name="here", state=JobState.COMPLETE, step=3))
    assert client.post("/jobs/local/here/checkpoints/read", follow_redirects=False).status_code == 400


def test_checkpoints_in_a_bucket_are_read_with_the_keys_of_the_job(
    client: TestClient, cluster: Cluster, tmp_path: Path
) -> None:
    """With their actions; the folder stands for the bucket."""
    commit(prepared(tmp_path / "bucket"), 10)
    cluster.inventory = open_inventory(str(tmp_path / "bucket"))[0]
    path = f"/jobs/{PLACE}/tiny/checkpoints"
    text = client.get(path).text
    assert "Verify checkpoint-10" in text
    assert "Read them in a pod" not in text
    verified = client.post(f"{path}/verify", data={"checkpoint": "checkpoint-10"}, follow_redirects=False)
    assert finished(client, verified)["result"]["valid"] is True


def test_the_costs_of_a_job_of_a_cluster(client: TestClient, cluster: Cluster) -> None:
    """Two pods with four GPUs each; a job that has stopped does not wait."""
    cluster.fields = {"gpu_per_node": 4}
    assert "8 GPU" in client.get("/costs").text
    cluster.state, cluster.fields = JobState.SUSPENDED, {"created": "2020-01-01T00:00:00Z"}
    assert re.search(r'data-label="Waited" class="num">0.00 s<', client.get("/costs").text)


def test_a_page_does_not_wait_for_a_newer_list(
    client: TestClient, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows the last one while the next one is read, but not after an action; what looks for changes waits."""
    client.get("/jobs")
    monkeypatch.setattr(places_module, "_OLDEST_ON_CLUSTER_S", 600.0)
    reader = client.app.state.context.places.readers[PLACE]  # pyright: ignore
    cluster.fields = {"queue": "newer"}
    reader._on_thread(reader._refresh)
    cluster.is_held.clear()
    assert "queue newer" in client.get("/jobs").text
    cluster.fields = {"queue": "newest"}
    assert "queue newer" in client.get("/jobs").text
    cluster.is_held.set()
    assert reader.read(waits=True).jobs["tiny"].job.queue == "newest"
    cluster.fields = {"queue": "last"}
    reader.expire()
    assert "queue last" in client.get("/jobs").text


def test_a_claim_that_is_nearly_full(client: TestClient, cluster: Cluster) -> None:
    """The forecast that the pods have posted; how much is free is not known."""
    space = SpaceRecord(place="folder", saves_left=2, remaining_s=600.0, is_low=True)
    cluster.fields = {"progress": Progress(time=at(1), state=State.TRAINING, step=5, space=(space,))}
    [room] = client.get("/storage.json").json()
    assert (room["location"], room["saves_left"], room["is_low"]) == ("pvc://ckpt/tiny", 2, True)
    assert room["free_bytes"] is None
    assert f'href="/jobs/{PLACE}/tiny/checkpoints"' in client.get("/storage").text


def test_how_full_a_claim_is(client: TestClient, cluster: Cluster) -> None:
    """As the pods have posted it, also while there is room; a warning about another folder is shown, too."""
    output = SpaceRecord(place=OUTPUT_FOLDER, free_bytes=25_000, size_bytes=100_000, remaining_s=86_400.0)
    cluster.fields = {"progress": Progress(time=at(1), state=State.TRAINING, step=5, space=(output,))}
    [room] = client.get("/storage.json").json()
    assert (room["free_bytes"], room["used_share"], room["is_low"]) == (25_000, 0.75, False)
    assert room["growth_bytes_s"] == pytest.approx(25_000 / 86_400)
    assert "75 % of the claim" in client.get("/storage").text
    low = SpaceRecord(place="folder", saves_left=2, remaining_s=600.0, is_low=True)
    cluster.fields = {"progress": Progress(time=at(1), state=State.TRAINING, step=6, space=(low, output))}
    [room] = client.get("/storage.json").json()
    assert (room["used_share"], room["saves_left"], room["remaining_s"], room["is_low"]) == (0.75, 2, 600.0, True)
    assert room["growth_bytes_s"] == pytest.approx(25_000 / 86_400)


def test_hostile_texts_of_a_cluster_are_shown_as_text(client: TestClient, cluster: Cluster, tmp_path: Path) -> None:
    """In objects, events, output and answers of pods: they add no element, attribute or link of another kind."""
    commit(prepared(tmp_path / "claim"), 10)
    [item] = open_inventory(str(tmp_path / "claim"))[0].items()
    document = list_document(item, item.faults, deep=False)
    cluster.state = JobState.FAILED
    usual: dict[str, Tags] = {}
    job = f"/jobs/{PLACE}/tiny"
    for text in ("harmless", *HOSTILE):
        cluster.text = text
        pod = PodSummary(name=text, node=0, phase=text, machine=text, restarts=1, reason=text, memory=text)
        named = dict.fromkeys(
            ("message", "command", "queue", "priority_class", "warning", "place", "namespace"), text
        )
        cluster.fields = {**named, "pods": (pod,), "options": {text: text}, "output": f"pvc://ckpt/{text}"}
        faults = [{"file": text, "reason": text}]
        cluster.in_pod = [{**document, "name": text, "where": text, "created": text, "faults": faults}]
        assert finished(client, client.post(f"{job}/checkpoints/read", follow_redirects=False))["state"] == "done"
        for path in ("/jobs", job, f"{job}/events", f"{job}/logs", f"{job}/checkpoints", "/storage", "/costs"):
            answer, tags = client.get(path), Tags()
            assert answer.status_code == 200, (path, text)
            tags.feed(answer.text)
            usual.setdefault(path, tags)
            assert tags.found <= usual[path].found | {("time", ("datetime", "title"))}, (path, text)
            assert all(link.startswith(("/", "#", "?")) for link in tags.links), (path, text)
            assert "secret" not in "".join(tags.text), (path, text)
        cluster.fields |= {"output": f"s3://ckpt/{text}"}
        client.get("/storage.json")  # waits until the location was opened, which fails
        answer, tags = client.get("/storage"), Tags()
        tags.feed(answer.text)
        usual.setdefault("bucket", tags)
        assert tags.found <= usual["bucket"].found, text
        assert all(link.startswith(("/", "#", "?")) for link in tags.links), text
        assert "secret" not in "".join(tags.text), text


def finished(client: TestClient, answer: Any) -> Any:
    """What has become of an action."""
    path = answer.headers["location"]
    for thread in threading.enumerate():
        if thread.name == f"safepoint-action-{path.rpartition('/')[2]}":
            thread.join(30 * PATIENCE)
    return client.get(f"{path}.json").json()


def test_the_receipt_of_a_cluster_is_shown(client: TestClient) -> None:
    """As its pod has made it."""
    answer = client.post(f"/jobs/{PLACE}/tiny/suspend", follow_redirects=False)
    assert finished(client, answer)["result"]["receipt"]["step"] == 12
    text = client.get(answer.headers["location"]).text
    assert "pvc://ckpt/tiny/checkpoint-12" in text
    assert "every file was read and matches its digest" in text


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


def test_what_the_pods_have_posted_about_interruptions(client: TestClient, cluster: Cluster) -> None:
    """The number of starts, and the repeated steps at the pace of now, for all slots; the rest is not known."""
    posted = Progress(time=at(1), state=State.TRAINING, step=90, step_s=2.0, attempt=4, repeated_steps=30)
    cluster.fields = {"gpu_per_node": 4, "progress": posted}
    [document] = client.get("/costs.json").json()
    assert (document["num_interruptions"], document["seconds"]["lost"]) == (3, 60.0)
    assert (document["interruptions"], document["seconds"]["down"]) == ([], None)
    text = client.get("/costs").text
    assert re.search(r'data-label="Computed twice" class="num">8 m', text)
    assert re.search(r'data-label="Interruptions" class="num">3<', text)
    assert re.search(r'data-label="Until it trained again" class="num">—<', text)
    assert re.search(r'<dt>Computed twice</dt><dd class="num">0.13', text)
    assert re.search(r'<dt>Saved by Safepoint</dt><dd class="num">—<', text)  # a sum of nothing is not 0
    cluster.fields = {"progress": replace(posted, repeated_steps=None, attempt=0)}
    text = client.get("/costs").text
    assert re.search(r'data-label="Computed twice" class="num">—<', text)
    assert re.search(r'data-label="Interruptions" class="num">—<', text)
