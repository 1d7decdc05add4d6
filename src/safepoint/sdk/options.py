"""Reads the settings that Kubeflow's options make in a TrainJob; defines the older option `PodTemplateOverrides`.

The names of `kubeflow.trainer.options` can be imported from here too.

An option is called with the TrainJob as nested dicts, and changes these dicts. Promises: if a setting of an option
cannot be used, there is an error or a warning. The field `manager` of a patch in `runtimePatches` names the program
that set the patch. A TrainJob has at most one patch with the same `manager`, so patches with the same `manager` are
merged into one. A patch without `manager` counts as a patch of Kubeflow's SDK.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from safepoint.errors import UsageError
from safepoint.jobs.cluster.objects import at
from safepoint.sdk.upstream import KubernetesBackend, upstream_options

_MANAGER = "trainer.kubeflow.org/kubeflow-sdk"
_METADATA = {"name", "labels", "annotations"}
_SPEC = {"runtimePatches", "podTemplateOverrides", "activeDeadlineSeconds"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SetByOptions:
    """The settings that the options of a job make.

    Args:
        name: the name of the job; None if no option sets it.
        labels: the labels of the TrainJob.
        annotations: the annotations of the TrainJob.
        patches: the `runtimePatches` of the TrainJob, at most one for each `manager`.
        deadline_s: seconds after which the cluster ends the job; None for no limit.
    """

    name: str | None
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    patches: tuple[Mapping[str, Any], ...]
    deadline_s: int | None


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(upstream_options, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(upstream_options, name)


def apply_options(options: Sequence[Any], trainer: Any, backend: Any) -> SetByOptions:
    """Call the options, and return the settings that they make.

    Raises:
        UsageError: an option sets something that a job of Safepoint cannot have.
    """
    applied: dict[str, Any] = {}
    for option in options:
        option(applied, trainer, backend)
    applied = _plain(applied)
    metadata, spec = applied.get("metadata", {}), applied.get("spec", {})
    unknown = [f"metadata.{key}" for key in metadata.keys() - _METADATA]
    unknown += [f"spec.{key}" for key in spec.keys() - _SPEC]
    unknown += list(applied.keys() - {"metadata", "spec"})
    if unknown:
        raise UsageError(
            f"an option sets {', '.join(sorted(unknown))}, which Safepoint sets itself or does not know; nothing was "
            "submitted",
            hint="use Labels, Annotations, Name, ActiveDeadlineSeconds, RuntimePatch or PodTemplateOverrides",
        )
    patches = [*spec.get("runtimePatches", []), *map(_as_patch, spec.get("podTemplateOverrides", []))]
    of_managers: dict[str, Any] = {}
    for patch in patches:
        manager = patch.get("manager") or _MANAGER
        of_managers[manager] = _merged(of_managers.get(manager), patch)
    return SetByOptions(
        name=metadata.get("name"),
        labels=metadata.get("labels") or {},
        annotations=metadata.get("annotations") or {},
        patches=tuple(of_managers.values()),
        deadline_s=spec.get("activeDeadlineSeconds"),
    )


def _plain(value: Any) -> Any:
    """The value converted to the types of JSON; options may contain models of Kubeflow's API."""
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    return value


def _as_patch(override: Any) -> dict[str, Any]:
    """The patch that has the same effect as an element of `podTemplateOverrides`."""
    template = {key: override[key] for key in ("metadata", "spec") if key in override}
    jobs = [{"name": job["name"], "template": {"spec": {"template": template}}} for job in override["targetJobs"]]
    return {"manager": _MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}


def _merged(first: Any, second: Any) -> Any:
    """Two patches merged into one.

    If both patches set the same field, the value of the second patch is used. But objects and lists are merged:
    elements of two lists become one element if they have the same key (`_key_of`).
    """
    if isinstance(first, dict) and isinstance(second, dict):
        before, after = cast("dict[str, Any]", first), cast("dict[str, Any]", second)
        return {
            key: _merged(before[key], after[key])
            if key in before and key in after
            else before.get(key, after.get(key))
            for key in {**before, **after}
        }
    if isinstance(first, list) and isinstance(second, list):
        elements = list(cast("list[Any]", first))
        for item in cast("list[Any]", second):
            same = next((n for n, other in enumerate(elements) if _key_of(other) == _key_of(item) is not None), None)
            if same is None:
                elements.append(item)
            else:
                elements[same] = _merged(elements[same], item)
        return elements
    return second


def _key_of(element: Any) -> Any:
    """The value that identifies an element of a list: its mount path, or else its name; None if it has neither."""
    return at(element, "mountPath") or at(element, "name")


# ---- the older option, which Kubeflow's SDK had before RuntimePatch ------------------------------------------------


@dataclass
class ContainerOverride:
    """Variables and mounts for a container.

    Args:
        name: the container.
        env: the variables, in the form of Kubernetes.
        volume_mounts: the mounts, in the form of Kubernetes.
    """

    name: str
    env: list[dict[str, Any]] | None = None
    volume_mounts: list[dict[str, Any]] | None = None


@dataclass
class PodSpecOverride:
    """Changes of the specification of pods. Each field has the meaning that it has in Kubernetes."""

    service_account_name: str | None = None
    node_selector: dict[str, str] | None = None
    affinity: dict[str, Any] | None = None
    tolerations: list[dict[str, Any]] | None = None
    volumes: list[dict[str, Any]] | None = None
    init_containers: list[ContainerOverride] | None = None
    containers: list[ContainerOverride] | None = None
    scheduling_gates: list[dict[str, Any]] | None = None
    image_pull_secrets: list[dict[str, Any]] | None = None


@dataclass
class PodTemplateOverride:
    """A change of the pods of some replicated jobs.

    Args:
        target_jobs: the names of the replicated jobs, such as `node`.
        metadata: labels and annotations of the pods.
        spec: changes of the specification of the pods.
    """

    target_jobs: list[str]
    metadata: dict[str, Any] | None = None
    spec: PodSpecOverride | None = None


class PodTemplateOverrides:
    """An option of earlier releases of Kubeflow's SDK that changes pods. Later releases have `RuntimePatch` instead.

    Args:
        pod_overrides: the changes.

    Raises:
        ValueError: no change is given.
    """

    def __init__(self, *pod_overrides: PodTemplateOverride) -> None:
        if not pod_overrides:
            raise ValueError("PodTemplateOverrides needs at least one PodTemplateOverride")
        self.pod_overrides = list(pod_overrides)

    def __call__(self, job_spec: dict[str, Any], trainer: Any, backend: Any) -> None:
        """Add the changes to a TrainJob.

        Raises:
            ValueError: the backend is not the backend of a cluster.
        """
        if not isinstance(backend, KubernetesBackend):
            raise ValueError(  # noqa: TRY004  as Kubeflow's own options do
                f"PodTemplateOverrides is not compatible with {type(backend).__name__}; use it on a cluster"
            )
        overrides = job_spec.setdefault("spec", {}).setdefault("podTemplateOverrides", [])
        for override in self.pod_overrides:
            fields = {"metadata": override.metadata, "spec": _camel(override.spec)}
            given = {key: value for key, value in fields.items() if value is not None}
            overrides.append({"targetJobs": [{"name": job} for job in override.target_jobs], **given})


def _camel(value: Any) -> Any:
    """A dataclass as a dict with Kubernetes' names of its fields, without the fields that are None."""
    if isinstance(value, list):
        return [_camel(item) for item in cast("list[Any]", value)]
    if not dataclasses.is_dataclass(value):
        return value
    found: dict[str, Any] = {}
    for item in dataclasses.fields(value):
        first, *others = item.name.split("_")
        if getattr(value, item.name) is not None:
            found[first + "".join(map(str.capitalize, others))] = _camel(getattr(value, item.name))
    return found
