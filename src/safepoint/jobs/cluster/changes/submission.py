"""Creates the objects of a job. Attaches or deletes objects that a killed `submit` has left without an owner.

The owner of an object is a TrainJob. When this TrainJob is deleted, the cluster deletes the object too.
"""

import base64
import contextlib
import logging
import secrets
from collections.abc import Collection, Iterable

from safepoint.errors import AccessDeniedError, ConflictError, SafepointError, TransientError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.made_objects import KINDS, is_made, job_of, labelled, made_for
from safepoint.jobs.cluster.changes.trainer_releases import create_trainjob
from safepoint.jobs.cluster.manifests import Manifests
from safepoint.jobs.cluster.objects import Object, at, items, name_of, owners_of, texts, uid_of
from safepoint.jobs.cluster.pods.pod_fields import JOBSET_LABEL, own_pods
from safepoint.jobs.cluster.spec import DOMAIN, JOB_LABEL
from safepoint.jobs.cluster.transport.failures import AlreadyExistsError, NotAdmittedError

MARK = f"{DOMAIN}/submission"
"""The annotation of a TrainJob with a random text, which differs for each `submit`."""
_log = logging.getLogger("safepoint")
_ORPHAN_S = 600
"""An object without an owner is deleted if its job does not exist, and the object is older than this many seconds."""
_COLLECTED_WITHIN_S, _LOOK_S = 30.0, 0.5


def create_job(api: ClusterApi, manifests: Manifests) -> Object:
    """Create a TrainJob and the objects that its pods need, and return the TrainJob.

    Raises:
        AlreadyExistsError: there is a TrainJob of this name.
        AccessDeniedError: you may not create one of the objects, or may not make the TrainJob their owner.
        TransientError: the cluster did not answer: the TrainJob may exist, or the cluster may create it later.
        KeyboardInterrupt: the user has interrupted this process. The objects that were created are deleted. They stay
            only if the cluster may still carry out a request that got no answer.
    """
    made: list[tuple[str, Object]] = []
    requested: tuple[str, Object] | None = None
    is_left = False
    try:
        for kind, item in manifests.before:
            requested = (kind, item)
            created = _create_unless_left(api, kind, item)
            if created is None:
                is_left = True
            else:
                made.append((kind, created))
        trainjob = _marked(manifests.trainjob)
        requested = ("trainjobs", trainjob)
        job = create(api, "trainjobs", trainjob)
        made.append(("trainjobs", job))
        requested = None
        if is_left:
            own_left(api, job, kinds=set(KINDS) - {"configmaps"})
        # Objects without an owner would stay when the job is deleted.
        own(api, job, reversed(manifests.before))
    except KeyboardInterrupt:
        _undo(api, made, unanswered=requested)
        raise
    except NotAdmittedError:
        _undo(api, made)
        raise
    except (TransientError, AlreadyExistsError):
        # After a TransientError, the job may exist, or may be created later. After an AlreadyExistsError, another
        # `submit` may have made a job that uses these objects. In both cases the objects stay, and a later `repair`
        # attaches or deletes them.
        raise
    except SafepointError:
        _undo(api, made)
        raise
    return job


def _create_unless_left(api: ClusterApi, kind: str, item: Object) -> Object | None:
    """Create an object of a job. Returns None if a killed `submit` has left the same object.

    If the object belongs to a job that was deleted, the cluster is about to delete the object too. So wait until the
    object is gone, and then create a new object.

    Raises:
        ConflictError: there is an object of this name with another content.
    """
    deadline_s = clock.monotonic_s() + _COLLECTED_WITHIN_S
    while True:
        try:
            return create(api, kind, item)
        except AlreadyExistsError:
            found = api.find(kind, name_of(item))
        if found is not None:
            _check_content(item, found)
            owners, job = owners_of(found), api.find("trainjobs", job_of(found))
            is_collected = bool(owners) and uid_of(job) not in owners
            if not is_collected or clock.monotonic_s() > deadline_s:
                return None
        clock.sleep(_LOOK_S)


def _undo(api: ClusterApi, made: list[tuple[str, Object]], *, unanswered: tuple[str, Object] | None = None) -> None:
    """Delete what was created for a job.

    The config map is deleted last. If another object may still exist, the config map stays, because a later `repair`
    looks for other objects only if a config map has no owner.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        made: what was created.
        unanswered: the object that may exist, because the request to create it got no reply; None if there is no such
            object.
    """
    with contextlib.suppress(SafepointError):
        if unanswered is not None:
            kind, item = unanswered
            if kind == "trainjobs":
                _log.warning(
                    "interrupted while job %s was submitted: it may exist; `safepoint list` shows whether it does",
                    name_of(item),
                )
                return
            found = None if kind == "configmaps" else api.find(kind, name_of(item))
            # Leave everything, because the request may still be carried out.
            if found is None or items(found, "metadata", "ownerReferences"):
                return
            if _differs(item, found):  # another person may have made the object that was found
                return
            made = [*made, (kind, found)]
        for kind, item in reversed(made):
            api.delete(kind, name_of(item), uid=uid_of(item))


def create(api: ClusterApi, kind: str, body: Object) -> Object:
    """Create an object and return it. If the answer is lost, the object is read from the cluster.

    Raises:
        AlreadyExistsError: there is an object of this name, and no earlier try of this command has created it.
        TransientError: the cluster did not answer: the object may exist, or the cluster may create it later.
    """
    try:
        return create_trainjob(api, body) if kind == "trainjobs" else api.create(kind, body)
    except (TransientError, AlreadyExistsError) as error:
        mark = _mark_of(body)
        if isinstance(error, AlreadyExistsError) and mark is None:
            raise
        found = api.find(kind, name_of(body))
        if found is None:
            raise
        if mark is not None and _mark_of(found) != mark:
            raise AlreadyExistsError(
                f"there is a job {name_of(body)} already; another command has submitted it at the same time",
                hint="choose another name, or delete that job first",
            ) from error
        # A TrainJob is recognized by its mark, or by the digest in its name. The name of a Job is random, so this
        # command made the Job. The contents of both kinds cannot be compared, because the API server adds defaults.
        if kind not in {"trainjobs", "jobs"}:
            _check_content(body, found)
        return found


def _marked(trainjob: Object) -> Object:
    """The TrainJob with a random mark. If the answer to its creation is lost, the mark shows who created it."""
    metadata = trainjob["metadata"]
    notes = {**texts(metadata, "annotations"), MARK: secrets.token_hex(8)}
    return {**trainjob, "metadata": {**metadata, "annotations": notes}}


def _mark_of(item: Object) -> str | None:
    return texts(item, "metadata", "annotations").get(MARK)


def _check_content(wanted: Object, found: Object) -> None:
    """Raise ConflictError if an object with the right name has another content: another person may have made it."""
    if _differs(wanted, found):
        kind, name = wanted["kind"], name_of(wanted)
        raise ConflictError(
            f"the {kind} {name} exists already, with another content than this job needs; nothing was submitted",
            hint="find out who made it; then delete it, or submit the job under another name",
        )


def _differs(wanted: Object, found: Object) -> bool:
    """Whether an object has another content than `wanted`."""
    encoded = {key: base64.b64encode(text.encode()).decode() for key, text in texts(wanted, "stringData").items()}
    content = {key: wanted[key] for key in wanted if key not in {"apiVersion", "kind", "metadata", "stringData"}}
    content |= {"data": encoded} if encoded else {}
    return any(found.get(key) != value for key, value in content.items())


def own(api: ClusterApi, owner: Object, made: Iterable[tuple[str, Object]], *, beside: Object | None = None) -> None:
    """Make a TrainJob the only owner of other objects, so that the cluster deletes them with the TrainJob.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        owner: the TrainJob.
        made: kinds and objects.
        beside: another TrainJob that also owns the objects; None for no further owner. The cluster deletes the
            objects when both TrainJobs are gone.
    """
    owners = [owner] if beside is None else [beside, owner]
    for kind, item in made:
        if [at(one, "uid") for one in items(item, "metadata", "ownerReferences")] != list(map(uid_of, owners)):
            references = list(map(reference_to, owners))
            api.patch(kind, name_of(item), {"metadata": {"ownerReferences": references}})


def reference_to(owner: Object) -> Object:
    """The entry of `ownerReferences` for a TrainJob."""
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "name": name_of(owner),
        "uid": uid_of(owner),
    }


def own_left(api: ClusterApi, job: Object, *, kinds: Collection[str] = KINDS) -> None:
    """Make a TrainJob the owner of the objects that were made for it, and that a killed `submit` has left.

    `repair` looks for them only while a config map has no owner. A killed `submit` may have made the config map of a
    job that is submitted again. This config map is about to get an owner, and after that `repair` would not look for
    the other objects. `delete` calls this function too, because the config map itself may have no owner yet.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        job: the TrainJob.
        kinds: the kinds of the objects.
    """
    with contextlib.suppress(SafepointError):
        left = made_for(api, name_of(job), owners={uid_of(job)})
        own(api, job, [(kind, item) for kind, item in left if kind in kinds])


def is_gone(api: ClusterApi, name: str, uid: str) -> bool:
    """Whether the TrainJob with this uid, its JobSet and its pods are gone.

    A JobSet or pods that you may not read are not checked.
    """
    job = api.find("trainjobs", name)
    if job is not None:
        return uid_of(job) != uid
    with contextlib.suppress(AccessDeniedError):
        if api.find("jobsets", name) is not None:  # the JobSet may still create pods
            return False
    with contextlib.suppress(AccessDeniedError):
        return not own_pods(name, api.objects("pods", labels=f"{JOBSET_LABEL}={name}"))
    return True


def repair(api: ClusterApi) -> frozenset[str] | None:
    """Attach objects without an owner to their job. If the job does not exist, delete them after ten minutes.

    Only objects that Safepoint made are changed or deleted; see `made_objects`.

    The config map of a job is the first object that is created for it, and the last one that gets its owner. So if
    all config maps have owners, all other objects have owners too, and one request is enough to find that out.

    Returns:
        The names of the jobs that have config maps; None if you may not list config maps.
    """
    names: frozenset[str] | None = None
    with contextlib.suppress(AccessDeniedError):
        maps = api.objects("configmaps", labels=JOB_LABEL, has_content=False)
        names = frozenset(map(job_of, maps))
        if all(items(item, "metadata", "ownerReferences") for item in maps):
            return names
    jobs = {name_of(job): job for job in api.objects("trainjobs", labels=JOB_LABEL)}
    for kind, item in labelled(api):
        job, age_s = (
            jobs.get(job_of(item)),
            api.now_s() - clock.parse_utc(at(item, "metadata", "creationTimestamp")),
        )
        is_due = not items(item, "metadata", "ownerReferences") and (job is not None or age_s > _ORPHAN_S)
        if not is_due or not is_made(api, kind, item):
            continue
        if job is not None:
            own(api, job, [(kind, item)])
        else:
            api.delete(kind, name_of(item), uid=uid_of(item))
    return names
