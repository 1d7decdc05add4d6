"""A server that sends objects, lines or changes without end: memory and time stay bounded."""

import itertools
import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from safepoint.cli.commands import watch as watch_command
from safepoint.errors import SafepointError
from safepoint.jobs.cluster import api as cluster_api
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.connection import connect_to
from safepoint.jobs.cluster.helper import helper
from safepoint.jobs.cluster.watches import job_watch, pod_ends
from safepoint.jobs.cluster.watches.job_watch import JobWatch
from safepoint.jobs.cluster.watches.pod_ends import PodEnds
from tests.attacks.test_hostile_clusters import Handler, Server, job, kubeconfig, lists


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture
def api(server: Server, tmp_path: Path) -> Iterator[ClusterApi]:
    with ClusterApi(connect_to("c", file=kubeconfig(tmp_path, server.url)), within_s=0) as found:
        yield found


def endless(request: Handler, lines: Iterator[bytes]) -> None:
    request.send_response(200)
    request.end_headers()
    for line in lines:
        request.wfile.write(line)


def changes(kind: str, **fields: Any) -> Iterator[bytes]:
    for number in itertools.count():
        item = {**job(f"{kind}-{number}"), **fields}
        yield json.dumps({"type": "ADDED", "object": item}).encode() + b"\n"


def wait_for(is_done: Any, limit_s: float = 10) -> None:
    until_s = time.monotonic() + limit_s
    while not is_done():
        assert time.monotonic() < until_s
        time.sleep(0.02)


class TestWatches:
    @pytest.mark.parametrize(("limit", "value"), [("_MOST_OBJECTS", 50), ("_MOST_BYTES", 10_000)])
    def test_objects(
        self, limit: str, value: int, api: ClusterApi, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are kept up to a limit, then the watch ends with a message."""
        monkeypatch.setattr(job_watch, limit, value)

        def answer(request: Handler) -> None:
            endless(request, changes("a")) if "watch=true" in request.path else lists()(request)

        server.answers(answer)
        with JobWatch(api) as watch:
            wait_for(lambda: watch._failure is not None)
            with pytest.raises(SafepointError, match="are not watched"):
                watch.jobs()

    @pytest.mark.parametrize("size", [1, 100])
    def test_an_object_that_changes_often_counts_once(
        self, size: int, api: ClusterApi, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_watch, "_MOST_OBJECTS", 2)
        monkeypatch.setattr(job_watch, "_MOST_BYTES", 2000)
        seen = threading.Event()

        def many() -> Iterator[bytes]:
            for number in range(100):
                item = job("a", number="x" * (number % size))
                yield json.dumps({"type": "MODIFIED", "object": item}).encode() + b"\n"
            seen.set()
            time.sleep(30)

        def answer(request: Handler) -> None:
            endless(request, many()) if "watch=true" in request.path else lists()(request)

        server.answers(answer)
        with JobWatch(api) as watch:
            assert seen.wait(10)
            wait_for(watch.jobs)
            assert len(watch.jobs()) == 1

    def test_bookmarks(self, api: ClusterApi, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        """A watch ends soon after its time, also if it never had a change."""
        monkeypatch.setattr(cluster_api, "_LATE_S", 0.0)
        line = json.dumps({"type": "BOOKMARK", "object": job("a")}).encode() + b"\n"
        server.answers(lambda request: endless(request, itertools.repeat(line)))
        begun_s = time.monotonic()
        assert list(api.watch("pods", timeout_s=1)) == []
        assert time.monotonic() - begun_s < 5

    def test_pods_that_ended(self, api: ClusterApi, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pod_ends, "_MOST_PODS", 10)
        ended = {"name": "node", "state": {"terminated": {"startedAt": "x", "exitCode": 75}}}
        labels = {"batch.kubernetes.io/job-completion-index": "0", "jobset.sigs.k8s.io/replicatedjob-name": "node"}
        monkeypatch.setattr(pod_ends, "is_training_pod", lambda pod: True)
        monkeypatch.setattr(pod_ends, "own_pods", lambda name, pods: pods)
        num_sent = itertools.count()

        def pods() -> Iterator[bytes]:
            for line in changes("pod", status={"containerStatuses": [ended]}, labels=labels):
                next(num_sent)
                yield line

        def answer(request: Handler) -> None:
            if "watch=true" in request.path:
                endless(request, pods())
            else:
                lists()(request)

        server.answers(answer)
        with PodEnds(api, "a") as ends:
            wait_for(lambda: next(num_sent) > 5000)
            assert 0 < len(ends._codes) <= 10


class TestLists:
    def test_pages_of_large_objects(self, api: ClusterApi, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each page is below the limit of an answer, and there are many."""
        monkeypatch.setattr(cluster_api, "_MOST_OBJECT_BYTES", 1 << 20)
        page = {"items": [job("a", text="x" * 100_000)], "metadata": {"continue": "more"}}
        server.answers(lambda request: request.send(page))
        with pytest.raises(SafepointError, match=r"have more than 1,048,576 bytes"):
            api.objects("trainjobs")
        assert len(server.handler.seen) < 15


class TestLogs:
    def test_no_end_of_a_line(self, api: ClusterApi, server: Server) -> None:
        """The line is printed in pieces."""
        server.answers(lambda request: endless(request, itertools.repeat(b"x" * 65536)))
        tracemalloc.start()
        try:
            for line, _ in zip(api.log("a", "b", follow=True), range(20), strict=False):
                assert len(line) < 2 << 20
            assert tracemalloc.get_traced_memory()[1] < 32 << 20
        finally:
            tracemalloc.stop()

    def test_what_a_helper_prints(self, api: ClusterApi, server: Server) -> None:
        """The last lines are shown when it fails, and are not large."""
        said: Any = helper.deque(maxlen=20)
        line = b"x" * 500_000 + b"\n"
        server.answers(lambda request: request.send(line * 30))
        assert list(helper._frames(api, "pod", said)) == []
        assert sum(map(len, said)) < 1 << 20


def test_jobs_that_come_and_go(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What `watch` remembers of them goes with them."""

    class Job:
        def __init__(self, name: str) -> None:
            self.name = name

    monkeypatch.setattr(watch_command, "job_document", lambda jobs, job: {"name": job.name})
    monkeypatch.setattr(watch_command, "row", lambda job, progress: (job.name,) * len(watch_command.HEAD))
    for shown, kept in ((watch_command._Changes(), "_printed"), (watch_command._Screen(), "_losses")):
        for number in range(100):
            place: Any = type("Place", (), {"progress_of": lambda self, job: None})()
            jobs: Any = [Job(f"job-{number}")]
            shown(place, jobs)
        assert len(getattr(shown, kept)) == 1
    capsys.readouterr()
