"""Finds the objects that Safepoint made for jobs: config maps, Secrets and runtimes.

A label does not prove that Safepoint made an object: a person who may change only metadata can add the label to any
object. So an object counts as made by Safepoint only if it has a name that Safepoint derives for the job, and a
feature that such a person cannot change. Each kind has its own feature:

- a config map has the digest of its content in its name;
- a Secret has the type that Safepoint uses; Kubernetes never changes the type of a Secret;
- a runtime has the grace period that its name states.

Objects that already belong to the job's TrainJob are included too, because the cluster deletes them with the TrainJob
in any case.
"""

import base64
import contextlib
import re
from collections.abc import Set

from safepoint.errors import AccessDeniedError, SafepointError
from safepoint.jobs.cluster import pod_archive
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.manifests import Runtime, config_map_name
from safepoint.jobs.cluster.objects import Object, at, name_of, owners_of, texts, uid_of
from safepoint.jobs.cluster.spec import JOB_LABEL, SECRET_TYPE

KINDS = ("secrets", "trainingruntimes", "configmaps")
"""The kinds, in the order in which objects get an owner and are deleted. The config map has to be the last object of
a job; see `submission.repair`."""
_NAMES = {
    "configmaps": "{short}-[0-9a-f]{{12}}",
    "secrets": "{job}-((nodes|images)-[0-9a-f]{{8}}|dataset|model)",
    "trainingruntimes": "{job}-[0-9]+s",
}
"""Patterns of the names that `manifests_for` gives to the objects."""


def job_of(item: Object) -> str:
    """The job for which an object was made, according to its label."""
    return texts(item, "metadata", "labels").get(JOB_LABEL, "")


def labelled(api: ClusterApi, labels: str = JOB_LABEL) -> list[tuple[str, Object]]:
    """The objects with the label of a job and a name that Safepoint derives for this job, as pairs of kind and
    metadata.

    Another person may have made some of these objects; `is_made` checks one object. A kind that you may not list is
    left out.
    """
    found: list[tuple[str, Object]] = []
    for kind in KINDS:
        with contextlib.suppress(AccessDeniedError):
            listed = api.objects(kind, labels=labels, has_content=False)
            found += [(kind, item) for item in listed if has_derived_name(kind, item)]
    return found


def made_for(api: ClusterApi, job: str, *, owners: Set[str] = frozenset()) -> list[tuple[str, Object]]:
    """The objects that Safepoint made for a job, as pairs of kind and metadata.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        job: the name of the job.
        owners: the uids of the TrainJobs whose objects are included in any case.
    """
    return [
        (kind, item)
        for kind, item in labelled(api, f"{JOB_LABEL}={job}")
        if owners_of(item) & owners or is_made(api, kind, item)
    ]


def has_derived_name(kind: str, item: Object) -> bool:
    """Whether the name of an object is one that Safepoint derives for the job in its label."""
    job = job_of(item)
    short = config_map_name(job, "").removesuffix("-")
    pattern = _NAMES[kind].format(job=re.escape(job), short=re.escape(short))
    return bool(job) and re.fullmatch(pattern, name_of(item)) is not None


def is_made(api: ClusterApi, kind: str, item: Object) -> bool:
    """Whether Safepoint made an object. This sends one request, which does not read the content of a Secret.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        kind: the kind of the object, in the plural.
        item: the metadata of the object.

    Returns:
        False also if you may not read the object.
    """
    name = name_of(item)
    if not has_derived_name(kind, item):
        return False
    with contextlib.suppress(AccessDeniedError):
        if kind == "secrets":
            found = api.objects(kind, fields=f"metadata.name={name},type={SECRET_TYPE}", has_content=False)
            return any(uid_of(one) == uid_of(item) for one in found)
        document = api.find(kind, name)
        if document is None or uid_of(document) != uid_of(item):
            return False
        if kind == "configmaps":
            return _is_named_by_content(document)
        return _has_grace_of_name(document)
    return False


def _is_named_by_content(config_map: Object) -> bool:
    files = shipped_files(config_map)
    if files is None or at(config_map, "immutable") is not True:
        return False
    return name_of(config_map) == config_map_name(job_of(config_map), pod_archive.digest_of_files(files))


def shipped_files(config_map: Object) -> dict[str, bytes] | None:
    """The files in a config map, by name; None if its content is not valid."""
    try:
        return {name: base64.b64decode(text, validate=True) for name, text in texts(config_map, "binaryData").items()}
    except (ValueError, TypeError):
        return None


def _has_grace_of_name(runtime: Object) -> bool:
    try:
        grace_s = at(Runtime(document=runtime).pod, "terminationGracePeriodSeconds")
    except SafepointError:  # the runtime has no pods that train
        return False
    return name_of(runtime) == f"{job_of(runtime)}-{grace_s}s"
