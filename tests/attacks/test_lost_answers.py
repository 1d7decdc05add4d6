"""An API server that carries a request out and answers that it failed, as with "etcdserver: request timed out"."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lightkube")

from safepoint.errors import TransientError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes import submission
from safepoint.jobs.cluster.changes.submission import create_job
from safepoint.jobs.cluster.connection import connect_to
from safepoint.jobs.cluster.manifests import Manifests, Runtime, manifests_for
from safepoint.jobs.cluster.objects import at, name_of
from safepoint.jobs.cluster.spec import ClusterSpec
from safepoint.jobs.cluster.transport.failures import AlreadyExistsError
from safepoint.settings.run_settings import RunSettings
from tests.attacks.test_hostile_clusters import Handler, Server, kubeconfig
from tests.attacks.test_labels_of_others import Namespace
from tests.support.cluster.workspace import runtime


class Lossy(Namespace):
    """A namespace whose answers to the creation of `lost` are failures. It carries them out all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = ""
        self.status, self.is_carried_out = 504, True
        self.num_lost = 0

    def answer(self, request: Handler) -> None:
        kind, _ = self._target(request.path.partition("?")[0])
        if request.command != "POST":
            super().answer(request)
            return
        known = self.objects.get(kind, [])
        if any(name_of(item) == request.body["metadata"]["name"] for item in known):
            request.send({"kind": "Status", "reason": "AlreadyExists", "message": "exists"}, 409)
            return
        if kind != self.lost:
            super().answer(request)
            return
        self.num_lost += 1
        if self.is_carried_out:
            self.changes.append(f"POST {kind}")
            text = request.body.pop("stringData", None)  # as the API server does
            if text is not None:
                request.body["data"] = {key: base64.b64encode(one.encode()).decode() for key, one in text.items()}
            self.add(kind, request.body)
        request.send({"kind": "Status", "message": "etcdserver: request timed out"}, self.status)
        if self.status == 429:
            self.lost = ""


@pytest.fixture
def namespace() -> Lossy:
    return Lossy()


@pytest.fixture
def api(namespace: Lossy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterApi]:
    monkeypatch.setattr(clock, "sleep", lambda seconds: None)
    server = Server()
    server.answers(namespace.answer)
    with ClusterApi(connect_to("c", file=kubeconfig(tmp_path, server.url))) as found:
        yield found
    server.close()


@pytest.fixture
def manifests() -> Manifests:
    settings = RunSettings(output_dir="pvc://ckpt/x")
    spec = ClusterSpec(name="a", program=("a.py",), files={"a.py": b""}, num_nodes=2, settings=settings)
    return manifests_for(spec, Runtime(document=runtime()))


@pytest.mark.parametrize("lost", ["configmaps", "secrets", "trainjobs"])
@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_what_was_created_is_found(
    lost: str, status: int, namespace: Lossy, api: ClusterApi, manifests: Manifests
) -> None:
    """The job is submitted, and its objects get their owner. The request is not repeated."""
    namespace.lost, namespace.status = lost, status
    job = create_job(api, manifests)
    assert name_of(job) == "a"
    assert namespace.num_lost == 1
    owned = [change for change in namespace.changes if change.startswith("PATCH")]
    assert [change.split()[1].split("/")[0] for change in owned] == ["secrets", "configmaps"]


def test_what_was_not_created_is_reported(namespace: Lossy, api: ClusterApi, manifests: Manifests) -> None:
    namespace.lost, namespace.is_carried_out = "trainjobs", False
    with pytest.raises(TransientError, match="etcdserver: request timed out"):
        create_job(api, manifests)
    assert namespace.num_lost == 1


def test_a_server_that_is_busy_is_asked_again(namespace: Lossy, api: ClusterApi, manifests: Manifests) -> None:
    """With status 429, the server says that it has not carried out the request."""
    namespace.lost, namespace.status, namespace.is_carried_out = "trainjobs", 429, False
    assert name_of(create_job(api, manifests)) == "a"


@pytest.mark.parametrize("is_lost", [True, False])
def test_the_job_of_another_command_is_not_adopted(
    is_lost: bool, namespace: Lossy, api: ClusterApi, manifests: Manifests
) -> None:
    """Two users submit the same job at the same time."""
    create_job(api, manifests)
    [first] = namespace.objects["trainjobs"]
    if is_lost:
        namespace.lost, namespace.is_carried_out = "trainjobs", False
    with pytest.raises(AlreadyExistsError):
        submission.create(api, "trainjobs", submission._marked(manifests.trainjob))
    assert namespace.objects["trainjobs"] == [first]
    assert at(first, "metadata", "annotations", submission.MARK)
