"""Jobs for several releases of Trainer: 2.1 takes `podTemplateOverrides`, and later releases take `runtimePatches`.

Safepoint asks the API server to refuse unknown fields. Without this request, the API server would drop unknown
fields, and a job would start without its volumes.
"""

import copy
import logging
from typing import Any

from safepoint.errors import AccessDeniedError, UsageError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import Object, at, items, texts
from safepoint.jobs.cluster.spec import QUEUE_LABEL
from safepoint.jobs.cluster.transport.admission import RefusedError
from safepoint.jobs.cluster.transport.failures import AlreadyExistsError, UnknownFieldError

_log = logging.getLogger("safepoint")
_PATCHES, _OVERRIDES = "spec.runtimePatches", "spec.podTemplateOverrides"


def create_trainjob(api: ClusterApi, trainjob: Object) -> Object:
    """Create a TrainJob that is written for Trainer 2.2 and later. If the cluster has Trainer 2.1, convert it first.

    Raises:
        UsageError: the TrainJob uses something that the cluster's Trainer does not support.
    """
    try:
        try:
            return api.create("trainjobs", trainjob)
        except UnknownFieldError as error:
            if _PATCHES not in error.fields:
                raise
        converted = for_trainer_2_1(trainjob)
        _check_in_no_queue(api.create("trainjobs", converted, is_dry_run=True))
        return api.create("trainjobs", converted)
    except UnknownFieldError as error:
        raise _not_known(error, api.connection.name) from error


def form_for(api: ClusterApi, trainjob: Object, *, runtime: Object) -> Object:
    """The TrainJob in the form in which `create_trainjob` would create it; nothing is created.

    A dry run finds out which form the cluster's Trainer accepts. A user who may not create TrainJobs cannot make a
    dry run, and receives the form of Trainer 2.2. If a rule of the cluster, such as a quota, refuses the TrainJob, a
    warning is logged: Trainer accepts the form, because the API server checks the fields before the rules.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        trainjob: the TrainJob, written for Trainer 2.2 and later.
        runtime: the reference to a runtime that exists, for the dry run. The job's own runtime may not exist yet.

    Raises:
        UsageError: the TrainJob uses something that the cluster's Trainer does not support.
    """
    probe: Object = {**trainjob, "spec": {**trainjob["spec"], "runtimeRef": runtime}}
    older: Object | None = None
    try:
        try:
            api.create("trainjobs", probe, is_dry_run=True)
        except UnknownFieldError as error:
            if _PATCHES not in error.fields:
                raise
            older = for_trainer_2_1(trainjob)
            _check_in_no_queue(api.create("trainjobs", for_trainer_2_1(probe), is_dry_run=True))
    except UnknownFieldError as error:
        raise _not_known(error, api.connection.name) from error
    except (AccessDeniedError, AlreadyExistsError):
        pass
    except RefusedError as error:
        _log.warning("the cluster would refuse this job now: %s", error)
    return trainjob if older is None else older


def for_trainer_2_1(trainjob: Object) -> Object:
    """The TrainJob as Trainer 2.1 takes it, with `podTemplateOverrides` instead of `runtimePatches`.

    Raises:
        UsageError: the TrainJob uses something that Trainer 2.1 does not support.
    """
    queue = texts(trainjob, "metadata", "labels").get(QUEUE_LABEL)
    if queue is not None:
        raise UsageError(
            f"queue {queue} cannot be used: the cluster has Kubeflow Trainer 2.1, and Kueue would remove the volumes "
            "of its jobs; nothing was submitted",
            hint="submit without a queue, or ask the cluster's administrator for Trainer 2.2 or later",
        )
    converted = copy.deepcopy(trainjob)
    patches = converted["spec"].pop("runtimePatches", [])
    given = items(converted, "spec", "podTemplateOverrides")
    converted["spec"]["podTemplateOverrides"] = [*given, *(item for patch in patches for item in _overrides(patch))]
    return converted


def _check_in_no_queue(answer: Object) -> None:
    """Raise UsageError if Kueue puts the job into a queue, although the job names no queue.

    In a namespace with a LocalQueue named `default`, Kueue does this when a TrainJob is created.

    Args:
        answer: the TrainJob as the API server would store it.
    """
    queue = texts(answer, "metadata", "labels").get(QUEUE_LABEL)
    if queue is not None:
        raise UsageError(
            f"the job names no queue, so Kueue would put it into queue {queue}; Kueue would then remove the job's "
            "volumes, because the cluster has Kubeflow Trainer 2.1; nothing was submitted",
            hint=f"use a namespace without a LocalQueue named {queue}, or ask the cluster's administrator for "
            "Trainer 2.2 or later",
        )


def _overrides(patch: Any) -> list[Object]:
    found: list[Object] = []
    specification = at(patch, "trainingRuntimeSpec", "template", "spec")
    for job in items(specification, "replicatedJobs"):
        pod = at(job, "template", "spec", "template")
        override: Object = {"targetJobs": [{"name": at(job, "name")}]}
        override |= {key: value for key in ("metadata", "spec") if (value := at(pod, key)) is not None}
        if at(job, "template", "metadata") is None and pod is not None:
            found.append(override)
    if len(found) != len(items(specification, "replicatedJobs")) or at(
        patch, "trainingRuntimeSpec", "template", "metadata"
    ):
        raise UsageError(
            "a patch changes a Job or the JobSet itself, such as its labels, but Kubeflow Trainer 2.1 can patch only "
            "pods; nothing was submitted",
            hint="change the pods instead, or ask the cluster's administrator for Trainer 2.2 or later",
        )
    return found


def _not_known(error: UnknownFieldError, place: str) -> UsageError:
    """The exception to raise for a TrainJob with fields that the cluster's Trainer does not support."""
    if _OVERRIDES in error.fields:
        return UsageError(
            f"Kubeflow Trainer on cluster {place} takes neither runtimePatches nor podTemplateOverrides, so a job "
            "cannot mount its volumes; nothing was submitted",
            hint="Safepoint needs Trainer 2.1, 2.2 or 2.3",
        )
    return UsageError(
        f"Kubeflow Trainer on cluster {place} does not support {', '.join(error.fields)}; nothing was submitted",
        hint="leave out the option that sets this field, or ask the cluster's administrator for Trainer 2.3",
    )
