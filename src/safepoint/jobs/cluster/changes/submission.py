"""Creates the objects of a job, and finishes or removes what a command that was killed has left of one."""

import contextlib
from collections.abc import Iterable

from safepoint.errors import AccessDeniedError, SafepointError, TransientError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.trainer_releases import create_trainjob
from safepoint.jobs.cluster.failures import AlreadyExistsError
from safepoint.jobs.cluster.manifests import Manifests
from safepoint.jobs.cluster.objects import Object, at, items, name_of, texts, uid_of
from safepoint.jobs.cluster.spec import JOB_LABEL
from safepoint.jobs.cluster.state import JOBSET_LABEL

_MADE_FOR_JOBS = ("configmaps", "secrets", "trainingruntimes")
_ORPHAN_S = 600
"""An object for a job that does not exist is removed when it is older than this."""


def create_job(api: ClusterApi, manifests: Manifests) -> Object:
    """Create a job with all that it needs; returns its TrainJob.

    Raises:
        AlreadyExistsError: there is a job of this name.
        AccessDeniedError: you may not create it.
        TransientError: it may have been created, or may still be.
    """
    made: list[tuple[str, Object]] = []
    try:
        for kind, item in manifests.before:
            # A submit that was killed may have made it; its name is its digest, or the name of the job.
            with contextlib.suppress(AlreadyExistsError):
                made.append((kind, create(api, kind, item)))
        job = create(api, "trainjobs", manifests.trainjob)
        made.append(("trainjobs", job))
        own(api, job, manifests.before)  # without this right, what the job needs would stay after it
    except SafepointError as error:
        # Without an answer, or after Ctrl-C, the job may exist, or may still be created; another submit may have made
        # one that uses them: then `repair` decides.
        if not isinstance(error, TransientError | AlreadyExistsError):
            for kind, item in reversed(made):
                with contextlib.suppress(SafepointError):
                    api.delete(kind, name_of(item), uid=uid_of(item))
        raise
    return job


def create(api: ClusterApi, kind: str, body: Object) -> Object:
    """Create an object. If the answer is lost, the object is looked for.

    Raises:
        AlreadyExistsError: there is one of this name.
        TransientError: it may have been created, or may still be.
    """
    try:
        return create_trainjob(api, body) if kind == "trainjobs" else api.create(kind, body)
    except TransientError:
        found = api.find(kind, name_of(body))
        if found is None:
            raise
        return found


def own(api: ClusterApi, owner: Object, made: Iterable[tuple[str, Object]]) -> None:
    """Make a TrainJob the only owner of other objects, so that they are deleted with it."""
    reference = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "name": name_of(owner),
        "uid": uid_of(owner),
    }
    for kind, item in made:
        if [at(one, "uid") for one in items(item, "metadata", "ownerReferences")] != [uid_of(owner)]:
            api.patch(kind, name_of(item), {"metadata": {"ownerReferences": [reference]}})


def is_gone(api: ClusterApi, name: str, uid: str) -> bool:
    """Whether a TrainJob that was deleted is gone, and its JobSet and pods are too, as far as they may be read."""
    job = api.find("trainjobs", name)
    if job is not None:
        return uid_of(job) != uid
    with contextlib.suppress(AccessDeniedError):
        return api.find("jobsets", name) is None and not api.objects("pods", labels=f"{JOBSET_LABEL}={name}")
    return True


def made_for(api: ClusterApi, labels: str) -> list[tuple[str, Object]]:
    """What was made for jobs, as pairs of kind and object, as far as it may be listed."""
    found: list[tuple[str, Object]] = []
    for kind in _MADE_FOR_JOBS:
        with contextlib.suppress(AccessDeniedError):
            found += [(kind, item) for item in api.objects(kind, labels=labels, has_content=False)]
    return found


def repair(api: ClusterApi) -> int:
    """Finish or remove what a submit that was killed has left; returns the number of objects."""
    jobs = {name_of(job): job for job in api.objects("trainjobs", labels=JOB_LABEL)}
    num_repaired = 0
    for kind, item in made_for(api, JOB_LABEL):
        if items(item, "metadata", "ownerReferences"):
            continue
        job = jobs.get(texts(item, "metadata", "labels").get(JOB_LABEL, ""))
        if job is not None:
            own(api, job, [(kind, item)])
        elif clock.wall_s() - clock.parse_utc(at(item, "metadata", "creationTimestamp")) > _ORPHAN_S:
            api.delete(kind, name_of(item), uid=uid_of(item))
        else:
            continue
        num_repaired += 1
    return num_repaired
