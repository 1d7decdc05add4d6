"""Tests of safepoint.jobs.cluster.helper.helper_objects."""

import base64
from typing import Any

import pytest

from safepoint.errors import UsageError
from safepoint.jobs.cluster import pod_archive
from safepoint.jobs.cluster.helper.helper_objects import HelperRequest, PodBasis, config_maps, helper_job
from safepoint.jobs.cluster.manifests import Runtime, manifests_for
from safepoint.jobs.cluster.spec import ClusterSpec
from safepoint.settings.run_settings import RunSettings
from tests.support.cluster.workspace import runtime

REQUEST = HelperRequest(arguments=("checkpoints", "list"), claims=("ckpt",), is_read_only=True)


def basis(**changes: Any) -> PodBasis:
    made = Runtime(document=runtime())
    given = {"pod": made.pod, "container": made.container, "image": made.container["image"], "origin": "a runtime"}
    return PodBasis(**{**given, **changes})


def pod_of(job: Any) -> Any:
    return job["spec"]["template"]["spec"]


def test_it_vanishes_by_itself() -> None:
    job = helper_job("h", REQUEST, basis())
    assert job["spec"]["activeDeadlineSeconds"] <= 120
    assert job["spec"]["ttlSecondsAfterFinished"] <= 60
    assert job["spec"]["backoffLimit"] == 0
    (config_map,) = config_maps(REQUEST, {**job, "metadata": {"name": "h", "uid": "1-2"}})
    assert config_map["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "h", "uid": "1-2"}
    ]
    assert base64.b64decode(config_map["binaryData"][pod_archive.NAME]) == pod_archive.build_archive()
    assert {"name": "safepoint-helper-archive", "configMap": {"name": config_map["metadata"]["name"]}} in pod_of(job)[
        "volumes"
    ]


@pytest.mark.parametrize("is_read_only", [True, False])
def test_the_claim_is_mounted_for_what_the_command_does(is_read_only: bool) -> None:
    request = HelperRequest(arguments=("x",), claims=("a", "b"), is_read_only=is_read_only)
    pod = pod_of(helper_job("h", request, basis()))
    mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    for claim in ("a", "b"):
        assert mounts[f"/mnt/safepoint/{claim}"].get("readOnly", False) is is_read_only
    assert [volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume] == [
        {"claimName": "a"},
        {"claimName": "b"},
    ]


def test_what_the_runtime_mounts_is_read_only_and_its_training_is_left_out() -> None:
    made = Runtime(document=runtime())
    made.container["env"] += [
        {"name": "PET_NNODES", "value": "2"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}},
        {"name": "SAFEPOINT_OUTPUT_DIR", "value": "/x"},
    ]
    pod = pod_of(helper_job("h", REQUEST, basis(pod=made.pod, container=made.container)))
    (container,) = pod["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables["SAFEPOINT_PVC_MOUNTS"] == "ckpt=/mnt/safepoint/ckpt"
    assert variables["PATH"]
    assert not variables.keys() & {"PET_NNODES", "TOKEN", "SAFEPOINT_OUTPUT_DIR"}
    assert {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")} == {"/tmp"}
    assert pod["automountServiceAccountToken"] is False


def test_it_can_always_write_to_tmp() -> None:
    """It copies its program there. What the runtime mounts there would be read-only."""
    made = Runtime(document=runtime())
    made.pod["volumes"].append({"name": "scratch", "ephemeral": {"volumeClaimTemplate": {}}})
    made.container["volumeMounts"].append({"name": "scratch", "mountPath": "/tmp/"})
    pod = pod_of(helper_job("h", REQUEST, basis(pod=made.pod, container=made.container)))
    mounts = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"].startswith("/tmp")]
    assert mounts == [{"name": "safepoint-helper-tmp", "mountPath": "/tmp"}]
    assert "scratch" not in [volume["name"] for volume in pod["volumes"]]


def test_a_privileged_container_of_a_runtime() -> None:
    """The API would refuse a helper that is privileged, too, because it has no privilege escalation."""
    made = Runtime(document=runtime())
    rights = {"privileged": True, "allowPrivilegeEscalation": True, "runAsUser": 7}
    pod = pod_of(helper_job("h", REQUEST, basis(container={**made.container, "securityContext": rights})))
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsUser": 7,
    }


def test_it_may_run_under_the_restricted_standard() -> None:
    made = Runtime(document=runtime())
    user = {"runAsNonRoot": True, "runAsUser": 1000660000}
    pod = pod_of(helper_job("h", REQUEST, basis(pod={**made.pod, "securityContext": user})))
    assert pod["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, **user}
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_it_runs_where_the_claim_is_mounted() -> None:
    taint = {"key": "nvidia.com/gpu", "operator": "Exists"}
    pod = pod_of(helper_job("h", REQUEST, basis(node="gpu-1", tolerations=[taint, taint])))
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu-1"]}]}
    assert pod["tolerations"] == [taint]


def test_keys_are_references() -> None:
    request = HelperRequest(arguments=("x",), claims=(), is_read_only=True, connection="models")
    (container,) = pod_of(helper_job("h", request, basis()))["containers"]
    keys = [entry for entry in container["env"] if entry["name"] == "AWS_SECRET_ACCESS_KEY"]
    reference = {"name": "models", "key": "AWS_SECRET_ACCESS_KEY", "optional": True}
    assert keys == [{"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": reference}}]


def test_the_pieces_of_a_file_are_config_maps_of_the_same_job() -> None:
    request = HelperRequest(arguments=("x",), claims=("a",), is_read_only=False, pieces=(b"1", b"2"))
    job = helper_job("h", request, basis())
    maps = config_maps(request, {**job, "metadata": {"name": "h", "uid": "u"}})
    assert [list(item["binaryData"]) for item in maps[1:]] == [["0000"], ["0001"]]
    (pieces,) = [volume["projected"] for volume in pod_of(job)["volumes"] if "projected" in volume]
    assert [source["configMap"]["name"] for source in pieces["sources"]] == [
        item["metadata"]["name"] for item in maps[1:]
    ]


def test_memory_that_is_no_size_is_refused() -> None:
    with pytest.raises(UsageError, match="--memory"):
        HelperRequest(arguments=("x",), claims=(), is_read_only=True, memory="much")
    small = HelperRequest(arguments=("x",), claims=(), is_read_only=True, memory="128Mi")
    (container,) = pod_of(helper_job("h", small, basis()))["containers"]
    assert container["resources"]["requests"]["memory"] == "128Mi"


def test_it_has_no_rights_of_a_job_with_process_images() -> None:
    """It only reads a claim, and gets no key of the images."""
    made = manifests_for(
        ClusterSpec(
            name="tiny",
            program=("train.py",),
            files={"train.py": b""},
            settings=RunSettings(output_dir="pvc://data/a", freeze_as_last_resort=True),
        ),
        Runtime(document=runtime()),
    )
    [patch] = made.trainjob["spec"]["runtimePatches"]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    of_job = job["template"]["spec"]["template"]["spec"]
    given = PodBasis(pod=of_job, container=of_job["containers"][0], image="image", origin="job tiny")
    pod = pod_of(helper_job("h", REQUEST, given))
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not [volume for volume in pod["volumes"] if "secret" in volume]
