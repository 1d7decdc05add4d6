"""Someone who may change TrainJobs lets a job name the location of another run. Its owner deletes the checkpoints.

The commands act with the rights and the keys of the owner, who may delete more than that person.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from safepoint.errors import ConflictError, SafepointError
from safepoint.jobs.cluster import pod_archive
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.connection import connect_to
from safepoint.jobs.cluster.helper import job_removal, job_storage
from safepoint.jobs.cluster.records.storage_record import FILE
from tests.attacks.test_hostile_clusters import Handler, Server, kubeconfig
from tests.support.cluster.saving_jobs import SavingJob

OWN, OTHER = "s3://bucket/run", "s3://other-bucket/prod-run"


class Cluster:
    """An API server with these objects, which carries nothing out."""

    def __init__(self, *jobs: SavingJob) -> None:
        self.trainjobs = [job.trainjob for job in jobs]
        self.config_maps = [job.config_map for job in jobs]
        self.changes: list[str] = []

    def answer(self, request: Handler) -> None:
        parts = request.path.partition("?")[0].strip("/").split("/")
        if request.command != "GET":
            self.changes.append(f"{request.command} {'/'.join(parts[-2:])}")
            request.send({"metadata": {"name": parts[-1]}})
            return
        for kind, known in (("trainjobs", self.trainjobs), ("configmaps", self.config_maps)):
            if parts[-1] == kind:
                is_plan = "successor-of" in request.path
                request.send({"items": [] if is_plan else known, "metadata": {"resourceVersion": "1"}})
                return
            if parts[-2] == kind:
                found = [item for item in known if item["metadata"]["name"] == parts[-1]]
                request.send(found[0] if found else {"kind": "Status", "code": 404}, 200 if found else 404)
                return
        is_list = parts[-2] == "ns"
        request.send({"items": [], "metadata": {}} if is_list else {"code": 404}, 200 if is_list else 404)


class Use:
    """What `delete --checkpoints` would open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.opened: list[tuple[str, str | None]] = []
        self._path = tmp_path
        monkeypatch.setattr(job_storage, "open_directly", self._open)
        monkeypatch.setattr(job_storage, "remove_all", lambda inventories, shown: 0)

    def _open(self, api: Any, storage: Any, location: Any) -> object:
        self.opened.append((str(location), storage.connection))
        return object()

    def delete(self, cluster: Cluster, name: str = "a") -> None:
        server = Server()
        server.answers(cluster.answer)
        try:
            with ClusterApi(connect_to("c", file=kubeconfig(self._path, server.url)), within_s=0) as api:
                job_removal.delete_checkpoints(ClusterJobs(api), api, name, 5)
        finally:
            server.close()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Use:
    return Use(monkeypatch, tmp_path)


def annotate(trainjob: Any, output: str) -> None:
    record = json.loads(trainjob["metadata"]["annotations"]["safepoint.dev/job"])
    record["settings"]["SAFEPOINT_OUTPUT_DIR"] = output
    record["connection"] = "keys-of-others"
    trainjob["metadata"]["annotations"]["safepoint.dev/job"] = json.dumps(record)


def replace_trainer(trainjob: Any, output: str) -> None:
    """Trainer refuses to change it, but not to remove it and then to add this."""
    reference = {"secretKeyRef": {"name": "keys-of-others", "key": "AWS_ACCESS_KEY_ID"}}
    trainjob["spec"]["trainer"]["env"] = [
        {"name": "SAFEPOINT_OUTPUT_DIR", "value": output},
        {"name": "AWS_ACCESS_KEY_ID", "valueFrom": reference},
    ]


def change_both(trainjob: Any, output: str) -> None:
    annotate(trainjob, output)
    replace_trainer(trainjob, output)


def change_the_digest(trainjob: Any, output: str) -> None:
    change_both(trainjob, output)
    command = trainjob["spec"]["trainer"]["command"]
    command[command.index(pod_archive.digest_in(command))] = "0" * 64


def test_the_location_of_the_job_is_used(use: Use) -> None:
    use.delete(Cluster(SavingJob(output=OWN, connection="models")))
    assert use.opened == [(OWN, "models")]


@pytest.mark.parametrize("change", [annotate, replace_trainer, change_both, change_the_digest])
@pytest.mark.parametrize("output", [OTHER, "s3://bucket", "pvc://claim/run"])
def test_a_job_that_names_another_location(change: Callable[[Any, str], None], output: str, use: Use) -> None:
    """Nothing is opened, marked or stopped."""
    job = SavingJob(output=OWN)
    change(job.trainjob, output)
    cluster = Cluster(job)
    with pytest.raises(ConflictError, match="nothing was done"):
        use.delete(cluster)
    assert use.opened == []
    assert cluster.changes == []


def test_the_config_map_of_another_job(use: Use) -> None:
    """A job whose command names it would delete the checkpoints of that job."""
    name = "a" * 40  # of longer names, the names of config maps have only so much
    job, other = SavingJob(f"{name}-1", output=OWN), SavingJob(f"{name}-2", output=OTHER)
    change_both(job.trainjob, OTHER)
    job.trainjob["spec"]["trainer"]["command"] = other.trainjob["spec"]["trainer"]["command"]
    cluster = Cluster(job, other)
    other.trainjob["metadata"]["name"] = "b"
    other.trainjob["spec"]["trainer"]["env"] = []  # it seems not to use its location
    with pytest.raises(ConflictError, match="nothing was done"):
        use.delete(cluster, f"{name}-1")
    assert use.opened == []


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_config_map_that_was_replaced(is_deleted: bool, use: Use) -> None:
    """By someone who may delete and create config maps, and not change TrainJobs."""
    job = SavingJob(output=OWN)
    record = {"job": "a", "output": OTHER, "connection": None, "env": {}}
    job.config_map["binaryData"][FILE] = base64.b64encode(json.dumps(record).encode()).decode()
    cluster = Cluster(job)
    if is_deleted:
        cluster.config_maps = []
    with pytest.raises(ConflictError, match="is missing, or was changed after the job was submitted"):
        use.delete(cluster)
    assert use.opened == []


def test_a_location_that_changes_meanwhile(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether another job uses the location was checked for the one before."""
    cluster = Cluster(SavingJob(output=OWN))
    later = SavingJob(output=OTHER)
    calls = iter([SavingJob(output=OWN).trainjob] * 2)
    monkeypatch.setattr(
        ClusterJobs,
        "observe",
        lambda self, name: job_removal.Observed(trainjob=next(calls, later.trainjob)),
    )
    with pytest.raises(SafepointError, match="has changed from"):
        use.delete(cluster)
    assert use.opened == []
