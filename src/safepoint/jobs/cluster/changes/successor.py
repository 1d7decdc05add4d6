"""Changes a job's number of nodes: a new TrainJob of the same name, its successor, replaces the old one.

The old TrainJob cannot be changed, because Kubernetes refuses changes of `spec.trainer`. Until the successor exists,
the cluster keeps a plan for it, in an annotation of a further TrainJob. This further TrainJob is suspended and does
nothing. The plan is kept in a TrainJob so that only people who may create TrainJobs can create a plan. A person who
may change TrainJobs can change a plan too (docs/security.md). Every command that looks at the job carries out the
next step of the plan. A step may be done twice without harm:

1. Write the plan, with the uid of the old TrainJob.
2. Stop the old TrainJob, with a checkpoint.
3. Make the whole document of the successor from the old TrainJob, and add it to the plan. Make the TrainJob of the
   plan the owner of the objects that were made for the job (its program, its Secret, its runtime).
4. Delete the old TrainJob.
5. When the JobSet and the pods of the old TrainJob are gone too, create the successor. Make the successor the owner
   of the objects that were made for the job, and delete the plan.
"""

import contextlib
import copy
import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from safepoint.errors import AccessDeniedError, ConflictError, UsageError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.made_objects import made_for
from safepoint.jobs.cluster.changes.submission import create, own
from safepoint.jobs.cluster.manifests import add_secret, mounts_secret
from safepoint.jobs.cluster.objects import Object, at, items, name_of, texts, uid_of
from safepoint.jobs.cluster.records.receipts import RECEIPT
from safepoint.jobs.cluster.spec import DOMAIN, PLAN_LABEL, RECORD, is_plan, plan_name, read_record
from safepoint.jobs.cluster.state import (
    CREATED,
    HISTORY,
    NODES,
    SAFE_STEP,
    SUSPENDED_BY,
    ClusterJob,
    attempts_before,
)
from safepoint.jobs.cluster.transport.failures import AlreadyExistsError
from safepoint.jobs.model.records import AttemptRecord, this_user

_PLAN = f"{DOMAIN}/plan"
"""The annotation of a successor: the uid of the TrainJob that keeps its plan."""
_CONTENT = f"{DOMAIN}/succession"
"""The annotation of a plan's TrainJob: the plan as JSON."""
_MOST_BYTES = (256 << 10) - (8 << 10)
"""Kubernetes' limit for all annotations of an object, less room for what is added to a plan after it is written."""
_KUEUE = "kueue.x-k8s.io"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan to replace a job's TrainJob by one with another number of nodes.

    Args:
        document: the TrainJob that keeps the plan.
        job: the name of the job.
        old_uid: the uid of the TrainJob to replace.
        num_nodes: the new number of nodes.
        actor: the user who asked for the change.
        successor: the new TrainJob; None while the old TrainJob may still run.
    """

    document: Object
    job: str
    old_uid: str
    num_nodes: int
    actor: str
    successor: Object | None

    @property
    def uid(self) -> str:
        """The uid of the TrainJob that keeps the plan."""
        return uid_of(self.document)


class Successions:
    """The plans of one namespace.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api = api

    def plan(self, job: str) -> Plan | None:
        """The plan for a job; None if there is none, or if you may not read TrainJobs."""
        self._api.check_name(job)
        with contextlib.suppress(AccessDeniedError):
            found = self._api.find("trainjobs", plan_name(job))
            return None if found is None else _plan(found)
        return None

    def write(self, old: Object, job: ClusterJob, num_nodes: int) -> Plan:
        """Write the plan for a job. If the job has a plan already, the new plan overwrites it.

        Raises:
            UsageError: the plan would be larger than the annotations of a TrainJob can be.
            ConflictError: a TrainJob that is no plan has the name that the plan's TrainJob needs.
        """
        document = _document(old)
        plan = Plan(
            document=document,
            job=job.name,
            old_uid=uid_of(old),
            num_nodes=num_nodes,
            actor=this_user(),
            successor=None,
        )
        size = len(_content(dataclasses.replace(plan, successor=_successor(plan, old, job))))
        if size > _MOST_BYTES:
            raise UsageError(
                f"job {job.name} was not scaled: the description of its new TrainJob has {size:,} bytes, and "
                f"a TrainJob has room for {_MOST_BYTES:,}",
                hint="suspend it, and submit it again with another number of nodes",
            )
        notes = {"metadata": {"annotations": {_CONTENT: _content(plan)}}}
        document["metadata"] |= notes["metadata"]
        try:
            written = _plan(create(self._api, "trainjobs", document))
        except AlreadyExistsError:
            written = _plan(self._api.patch("trainjobs", name_of(document), notes))
        if written is None:
            raise ConflictError(
                f"job {job.name} was not scaled: Safepoint needs the name {name_of(document)} for a TrainJob of "
                "its own, and another TrainJob has this name",
                hint=f"`kubectl delete trainjob {name_of(document)}` removes it",
            )
        return written

    def drop(self, plan: Plan) -> None:
        """Delete a plan without carrying it out.

        If the old TrainJob still exists, it becomes the owner of the job's objects again. Otherwise the cluster
        deletes these objects with the plan.
        """
        old = self._api.find("trainjobs", plan.job)
        if old is not None and uid_of(old) == plan.old_uid:
            own(self._api, old, self._made_for(plan))
        self._api.delete("trainjobs", name_of(plan.document), uid=plan.uid)

    def release(self, plan: Plan, old: Object, job: ClusterJob) -> None:
        """Write the successor into the plan, then delete the old TrainJob, which has stopped."""
        successor = _successor(plan, old, job)
        if plan.num_nodes > 1 and not mounts_secret(successor) and self._api.may("create", "secrets"):
            successor, secret = add_secret(successor)
            with contextlib.suppress(AlreadyExistsError):
                create(self._api, "secrets", secret)
        content = _content(dataclasses.replace(plan, successor=successor))
        self._api.patch("trainjobs", name_of(plan.document), {"metadata": {"annotations": {_CONTENT: content}}})
        own(self._api, plan.document, self._made_for(plan))
        self._api.delete("trainjobs", plan.job, uid=plan.old_uid)

    def create(self, plan: Plan) -> None:
        """Create the successor, if the plan contains it. The old TrainJob must be gone."""
        if plan.successor is not None:
            with contextlib.suppress(AlreadyExistsError):
                create(self._api, "trainjobs", plan.successor)

    def is_successor(self, plan: Plan, job: Object) -> bool:
        """Whether this TrainJob is the successor that the plan describes."""
        return texts(job, "metadata", "annotations").get(_PLAN) == plan.uid

    def finish(self, plan: Plan, job: Object) -> None:
        """Delete the plan. If `job` is its successor, first make `job` the owner of the job's objects."""
        if self.is_successor(plan, job):
            own(self._api, job, self._made_for(plan))
        self._api.delete("trainjobs", name_of(plan.document), uid=plan.uid)

    def _made_for(self, plan: Plan) -> list[tuple[str, Object]]:
        return made_for(self._api, plan.job, owners={plan.old_uid, plan.uid})


def _successor(plan: Plan, old: Object, job: ClusterJob) -> Object:
    """The new TrainJob, made from the old one. It resumes from the same checkpoints."""
    metadata: Any = at(old, "metadata")
    left_out = {SUSPENDED_BY, NODES, RECEIPT}
    notes = {key: text for key, text in texts(metadata, "annotations").items() if key not in left_out}
    ended = AttemptRecord(
        number=max(1, job.attempt),
        num_nodes=int(at(old, "spec", "trainer", "numNodes") or 1),
        started=str(at(metadata, "creationTimestamp")),
        ended=clock.utc_now(),
        outcome=f"Suspended: {plan.actor} changed the number of nodes to {plan.num_nodes}",
    )
    attempts = [dataclasses.asdict(attempt) for attempt in (*attempts_before(old), ended)]
    notes |= {CREATED: job.created, HISTORY: json.dumps(attempts), _PLAN: plan.uid}
    if job.safe_step is not None:
        notes[SAFE_STEP] = str(job.safe_step)
    record = read_record(notes.get(RECORD))
    if record:
        notes[RECORD] = json.dumps({**record, "num_nodes": plan.num_nodes}, sort_keys=True)
    spec = copy.deepcopy(at(old, "spec"))
    spec.pop("suspend", None)
    spec["trainer"]["numNodes"] = plan.num_nodes
    patches = [one for one in items(spec, "runtimePatches") if not str(at(one, "manager")).startswith(_KUEUE)]
    if "runtimePatches" in spec:
        spec["runtimePatches"] = patches
    return {
        "apiVersion": old["apiVersion"],
        "kind": old["kind"],
        "metadata": {
            "name": name_of(old),
            "namespace": at(metadata, "namespace"),
            "labels": texts(metadata, "labels"),
            "annotations": notes,
        },
        "spec": spec,
    }


def plans_among(trainjobs: Iterable[Object]) -> list[Plan]:
    """The plans that these TrainJobs keep. TrainJobs that train, instead of keeping a plan, are left out."""
    return [plan for item in trainjobs if (plan := _plan(item))]


def _document(old: Object) -> Object:
    """The TrainJob that keeps the plan for `old`. It is in no queue. If it is resumed, it runs `true` and ends."""
    return {
        "apiVersion": old["apiVersion"],
        "kind": old["kind"],
        "metadata": {"name": plan_name(name_of(old)), "labels": {PLAN_LABEL: name_of(old)}},
        "spec": {
            "suspend": True,
            "runtimeRef": at(old, "spec", "runtimeRef"),
            "trainer": {"numNodes": 1, "command": ["true"]},
        },
    }


def _content(plan: Plan) -> str:
    """The plan as the JSON text that its annotation keeps."""
    data = {"old": plan.old_uid, "nodes": plan.num_nodes, "actor": plan.actor, "successor": plan.successor}
    return json.dumps(data, separators=(",", ":"))


def _plan(item: Object) -> Plan | None:
    """The plan that a TrainJob keeps; None if the TrainJob keeps none, or if its annotation is not a valid plan."""
    if not is_plan(item):
        return None
    job = str(texts(item, "metadata", "labels")[PLAN_LABEL])
    try:
        data = json.loads(texts(item, "metadata", "annotations")[_CONTENT])
        successor = data["successor"]
        if successor is not None and not _is_trainjob(successor, job):
            return None
        return Plan(
            document=item,
            job=job,
            old_uid=str(data["old"]),
            num_nodes=int(data["nodes"]),
            actor=str(data["actor"]),
            successor=cast("Object | None", successor),
        )
    except (KeyError, TypeError, ValueError, RecursionError, OverflowError):
        return None


def _is_trainjob(successor: Any, name: str) -> bool:
    """Whether `successor` has the types that the API server requires. The API server did not check the annotation."""
    notes = [*texts(successor, "metadata", "labels").values(), *texts(successor, "metadata", "annotations").values()]
    is_noted = all(isinstance(text, str) for text in notes)  # pyright: ignore[reportUnnecessaryIsInstance]
    return name_of(successor) == name and isinstance(at(successor, "spec"), dict) and is_noted
