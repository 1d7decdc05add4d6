"""Options of Kubeflow's SDK: none of what they set is lost, and patches of one manager are one."""

from typing import Any

import pytest
from kubeflow_trainer_api.models import IoK8sApimachineryPkgApiResourceQuantity as Quantity

from safepoint.errors import UsageError
from safepoint.sdk.options import (
    ContainerOverride,
    PodSpecOverride,
    PodTemplateOverride,
    PodTemplateOverrides,
    SetByOptions,
    apply_options,
)
from safepoint.sdk.upstream import KubernetesBackend, common_options, kubernetes_options

BACKEND = object.__new__(KubernetesBackend)
MEMORY = {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": Quantity("1Gi")}}
DATA = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}


def apply(*options: Any) -> SetByOptions:
    return apply_options(options, None, BACKEND)


def patch(volume: dict[str, Any], path: str, job: str = "node") -> Any:
    options = kubernetes_options
    container = options.ContainerPatch(name="node", volume_mounts=[{"name": volume["name"], "mountPath": path}])
    pod = options.PodTemplatePatch(spec=options.PodSpecPatch(volumes=[volume], containers=[container]))
    template = options.JobTemplatePatch(spec=options.JobSpecPatch(template=pod))
    jobs = options.JobSetSpecPatch(replicated_jobs=[options.ReplicatedJobPatch(name=job, template=template)])
    return options.RuntimePatch(
        training_runtime_spec=options.TrainingRuntimeSpecPatch(template=options.JobSetTemplatePatch(spec=jobs))
    )


def override(volume: dict[str, Any], path: str) -> PodTemplateOverrides:
    container = ContainerOverride(name="node", volume_mounts=[{"name": volume["name"], "mountPath": path}])
    return PodTemplateOverrides(
        PodTemplateOverride(target_jobs=["node"], spec=PodSpecOverride(volumes=[volume], containers=[container]))
    )


def jobs_of(found: SetByOptions) -> Any:
    (only,) = found.patches
    return only["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]


def test_metadata() -> None:
    found = apply(
        common_options.Name("orpheus"),
        kubernetes_options.Labels({"a": "b"}),
        kubernetes_options.Annotations({"c": "d"}),
        kubernetes_options.ActiveDeadlineSeconds(60),
    )
    assert (found.name, found.labels, found.annotations) == ("orpheus", {"a": "b"}, {"c": "d"})
    assert found.deadline_s == 60
    assert found.patches == ()


def test_two_patches_of_one_manager_are_one() -> None:
    """A TrainJob has at most one patch of each manager; the cluster refuses another one."""
    found = apply(patch(MEMORY, "/dev/shm"), patch(DATA, "/mnt/data"), patch(DATA, "/mnt/data", job="other"))
    node, other = jobs_of(found)
    pod = node["template"]["spec"]["template"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["dshm", "data"]
    (container,) = pod["containers"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/dev/shm", "/mnt/data"]
    assert other["name"] == "other"


def test_quantities_of_the_api_become_text() -> None:
    (node,) = jobs_of(apply(patch(MEMORY, "/dev/shm")))
    (volume,) = node["template"]["spec"]["template"]["spec"]["volumes"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


@pytest.mark.parametrize("volume", [MEMORY, DATA], ids=["memory", "claim"])
def test_the_older_option_has_the_same_effect(volume: dict[str, Any]) -> None:
    assert apply(override(volume, "/mnt/data")).patches == apply(patch(volume, "/mnt/data")).patches


def test_the_older_option_is_merged_with_the_newer_one() -> None:
    (node,) = jobs_of(apply(patch(DATA, "/mnt/data"), override(MEMORY, "/dev/shm")))
    assert len(node["template"]["spec"]["template"]["spec"]["volumes"]) == 2


def test_the_older_option_is_for_clusters() -> None:
    with pytest.raises(ValueError, match="not compatible with object"):
        apply_options([override(DATA, "/mnt/data")], None, object())
    with pytest.raises(ValueError, match="at least one"):
        PodTemplateOverrides()


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"spec": {"trainer": {"command": ["true"]}}}, "spec.trainer"),
        ({"spec": {"suspend": True}}, "spec.suspend"),
        ({"metadata": {"namespace": "other"}}, "metadata.namespace"),
        ({"status": {}}, "status"),
    ],
)
def test_what_a_job_cannot_have_is_refused(part: dict[str, Any], what: str) -> None:
    def option(job_spec: dict[str, Any], trainer: Any, backend: Any) -> None:
        job_spec.update(part)

    with pytest.raises(UsageError, match=f"sets {what}, which"):
        apply(option)
