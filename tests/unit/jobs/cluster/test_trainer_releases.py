"""Tests of safepoint.jobs.cluster.changes.trainer_releases; see tests/cluster/test_older_trainers.py too."""

from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.errors import UsageError
from safepoint.jobs.cluster.changes.trainer_releases import create_trainjob, form_for
from safepoint.jobs.cluster.spec import QUEUE_LABEL
from safepoint.jobs.cluster.transport.failures import refusal


class Cluster:
    """An API server that does not know some fields."""

    connection = SimpleNamespace(name="here")

    def __init__(self, *unknown: str, queue: str | None = None) -> None:
        self.unknown = unknown
        self.added = {} if queue is None else {QUEUE_LABEL: queue}
        self.made: list[Any] = []
        self.asked: list[Any] = []

    def create(self, kind: str, body: Any, *, is_dry_run: bool = False) -> Any:
        found = [name for name in self.unknown if name.rpartition(".")[2] in body["spec"]]
        if found:
            message = "strict decoding error: " + ", ".join(f'unknown field "{name}"' for name in found)
            raise refusal(400, {"message": message}, f"POST {kind}")
        self.asked.append(body)
        if not is_dry_run:
            self.made.append(body)
        return {**body, "metadata": {**body["metadata"], "labels": {**body["metadata"]["labels"], **self.added}}}


def job(**pod: Any) -> Any:
    template = {"spec": {"template": {"spec": pod}}}
    specification = {"template": {"spec": {"replicatedJobs": [{"name": "node", "template": template}]}}}
    patch = {"manager": "m", "trainingRuntimeSpec": specification}
    return {"metadata": {"name": "a", "labels": {}}, "spec": {"runtimePatches": [patch, patch]}}


def test_a_release_that_knows_patches() -> None:
    cluster, given = Cluster(), job(volumes=[1])
    assert create_trainjob(cluster, given) == given


def test_trainer_2_1() -> None:
    """The patches become overrides of the pods; what was given is not changed."""
    cluster, given = Cluster("spec.runtimePatches"), job(volumes=[1])
    override = {"targetJobs": [{"name": "node"}], "spec": {"volumes": [1]}}
    assert create_trainjob(cluster, given)["spec"] == {"podTemplateOverrides": [override, override]}
    assert given == job(volumes=[1])


def test_a_queue_on_trainer_2_1() -> None:
    given = job()
    given["metadata"]["labels"][QUEUE_LABEL] = "gpus"
    with pytest.raises(UsageError, match=r"queue gpus cannot be used: .* Trainer 2\.1"):
        create_trainjob(Cluster("spec.runtimePatches"), given)


def test_a_default_queue_on_trainer_2_1() -> None:
    """Kueue adds its name when the TrainJob is created."""
    cluster = Cluster("spec.runtimePatches", queue="default")
    with pytest.raises(UsageError, match=r"into queue default; .* Trainer 2\.1; nothing was submitted"):
        create_trainjob(cluster, job())
    with pytest.raises(UsageError, match="into queue default"):
        form_for(cluster, job(), runtime=RUNTIME)
    assert cluster.made == []
    newer = Cluster(queue="default")
    create_trainjob(newer, job())
    assert len(newer.made) == 1


def test_a_patch_of_a_job_on_trainer_2_1() -> None:
    given = job()
    specification = given["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    specification["replicatedJobs"][0]["template"]["metadata"] = {"labels": {"a": "b"}}
    with pytest.raises(UsageError, match="a patch changes a Job or the JobSet"):
        create_trainjob(Cluster("spec.runtimePatches"), given)


@pytest.mark.parametrize(
    ("unknown", "said"),
    [
        (("spec.runtimePatches", "spec.podTemplateOverrides"), "neither runtimePatches nor podTemplateOverrides"),
        (("spec.activeDeadlineSeconds",), "here does not support spec.activeDeadlineSeconds; nothing was submitted"),
        (("spec.runtimePatches", "spec.activeDeadlineSeconds"), "does not support spec.activeDeadlineSeconds"),
    ],
)
def test_what_a_release_does_not_know(unknown: tuple[str, ...], said: str) -> None:
    cluster, given = Cluster(*unknown), job()
    given["spec"]["activeDeadlineSeconds"] = 60
    with pytest.raises(UsageError, match=said):
        create_trainjob(cluster, given)
    assert not cluster.made


RUNTIME = {"name": "torch-distributed", "kind": "ClusterTrainingRuntime"}


def test_a_dry_run_has_the_form_of_the_cluster() -> None:
    """Nothing is created; the cluster is asked with a runtime that exists, and the form names the job's own."""
    given = job(volumes=[1])
    given["spec"]["runtimeRef"] = {"name": "a-45s", "kind": "TrainingRuntime"}
    newer, older = Cluster(), Cluster("spec.runtimePatches")
    assert form_for(newer, given, runtime=RUNTIME) == given
    found = form_for(older, given, runtime=RUNTIME)
    assert found["spec"]["podTemplateOverrides"]
    assert found["spec"]["runtimeRef"] == given["spec"]["runtimeRef"]
    for cluster in (newer, older):
        assert cluster.made == []
        assert [item["spec"]["runtimeRef"] for item in cluster.asked] == [RUNTIME]
    neither = Cluster("spec.runtimePatches", "spec.podTemplateOverrides")
    with pytest.raises(UsageError, match="takes neither"):
        form_for(neither, given, runtime=RUNTIME)


def test_a_dry_run_that_a_rule_of_the_cluster_refuses(caplog: pytest.LogCaptureFixture) -> None:
    """The API server has checked the fields before, so the form is known. The quota is shown in a warning."""
    why = "exceeded quota: few, requested: count/trainjobs=1, used: count/trainjobs=3, limited: count/trainjobs=3"

    class Full(Cluster):
        def create(self, kind: str, body: Any, *, is_dry_run: bool = False) -> Any:
            super().create(kind, body, is_dry_run=is_dry_run)
            raise refusal(403, {"message": f'trainjobs "a" is forbidden: {why}'}, f"POST {kind}")

    assert form_for(Full(), job(), runtime=RUNTIME) == job()
    assert "podTemplateOverrides" in form_for(Full("spec.runtimePatches"), job(), runtime=RUNTIME)["spec"]
    assert len(caplog.messages) == 2
    assert "count/trainjobs: 3 of 3 used, 1 more needed" in caplog.text
