"""A job gets another number of nodes: a new TrainJob of its name succeeds it, as `spec.trainer` cannot be changed.

A plan of this lies in the cluster until the successor exists: in an annotation of a suspended TrainJob, which does
nothing. So a person needs the right to create TrainJobs in order to write a plan that creates one. Every command that
looks at the job carries the plan on, one step at a time, and each step may be done twice:

1. The plan is written, with the id of the old TrainJob.
2. The old one is stopped, with a checkpoint.
3. The plan receives the whole successor, which is always made from the old TrainJob. It owns what was made for the
   job (its program, its Secret, its runtime).
4. The old one is deleted.
5. When the JobSet and the pods of the old one are gone too, the successor is created, and owns what was made for the
   job. The plan is deleted.
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
from safepoint.jobs.cluster.changes.submission import create, made_for, own
from safepoint.jobs.cluster.failures import AlreadyExistsError
from safepoint.jobs.cluster.manifests import add_secret, mounts_secret
from safepoint.jobs.cluster.objects import Object, at, items, name_of, texts, uid_of
from safepoint.jobs.cluster.spec import DOMAIN, JOB_LABEL, PLAN_LABEL, RECORD, is_plan, plan_name, read_record
from safepoint.jobs.cluster.state import (
    CREATED,
    HISTORY,
    NODES,
    SAFE_STEP,
    SUSPENDED_BY,
    ClusterJob,
    attempts_before,
)
from safepoint.jobs.model.records import AttemptRecord, this_user

_PLAN = f"{DOMAIN}/plan"
"""The annotation of a successor with the id of its plan."""
_CONTENT = f"{DOMAIN}/succession"
"""The annotation of a plan with all that it says."""
_MOST_BYTES = (256 << 10) - (8 << 10)
"""Kubernetes' limit for all annotations of an object, less what a plan receives after it is written."""
_KUEUE = "kueue.x-k8s.io"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A TrainJob of the same name that is about to come.

    Args:
        document: the TrainJob that keeps it.
        job: the name of the job.
        old_uid: the id of the TrainJob that it succeeds.
        num_nodes: its number of nodes.
        actor: who asked for it.
        successor: the new TrainJob; None while the old one may still run.
    """

    document: Object
    job: str
    old_uid: str
    num_nodes: int
    actor: str
    successor: Object | None

    @property
    def uid(self) -> str:
        """The id of the plan."""
        return uid_of(self.document)


class Successions:
    """The plans of one namespace.

    Args:
        api: the namespace.
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api = api

    def plan(self, job: str) -> Plan | None:
        """The plan of a job; None without one, or without the right to look for it."""
        self._api.check_name(job)
        with contextlib.suppress(AccessDeniedError):
            found = self._api.find("trainjobs", plan_name(job))
            return None if found is None else _plan(found)
        return None

    def write(self, old: Object, job: ClusterJob, num_nodes: int) -> Plan:
        """Write the plan for a job; a plan that exists for it gets this number of nodes.

        Raises:
            UsageError: it would be larger than a TrainJob can keep.
            ConflictError: another TrainJob has its name.
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
                f"job {job.name} was not scaled: the description of its successor has {size:,} bytes, and a TrainJob "
                f"has room for {_MOST_BYTES:,}",
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
                f"job {job.name} was not scaled: TrainJob {name_of(document)} exists, and is no plan of Safepoint",
                hint=f"`kubectl delete trainjob {name_of(document)}` removes it",
            )
        return written

    def drop(self, plan: Plan) -> None:
        """Give up a plan. What it owns goes back to the old TrainJob while that exists, and is deleted otherwise."""
        old = self._api.find("trainjobs", plan.job)
        if old is not None and uid_of(old) == plan.old_uid:
            own(self._api, old, self._made_for(plan.job))
        self._api.delete("trainjobs", name_of(plan.document), uid=plan.uid)

    def release(self, plan: Plan, old: Object, job: ClusterJob) -> None:
        """Delete the old TrainJob, which has stopped. Its successor is written down first."""
        successor = _successor(plan, old, job)
        if plan.num_nodes > 1 and not mounts_secret(successor) and self._api.may("create", "secrets"):
            successor, secret = add_secret(successor)
            with contextlib.suppress(AlreadyExistsError):
                create(self._api, "secrets", secret)
        content = _content(dataclasses.replace(plan, successor=successor))
        self._api.patch("trainjobs", name_of(plan.document), {"metadata": {"annotations": {_CONTENT: content}}})
        own(self._api, plan.document, self._made_for(plan.job))
        self._api.delete("trainjobs", plan.job, uid=plan.old_uid)

    def create(self, plan: Plan) -> None:
        """Create the successor, after the old TrainJob has gone."""
        if plan.successor is not None:
            with contextlib.suppress(AlreadyExistsError):
                create(self._api, "trainjobs", plan.successor)

    def is_successor(self, plan: Plan, job: Object) -> bool:
        """Whether this TrainJob is the one of the plan."""
        return texts(job, "metadata", "annotations").get(_PLAN) == plan.uid

    def finish(self, plan: Plan, job: Object) -> None:
        """Make the TrainJob of this name the owner of what was made for it, and delete the plan."""
        if self.is_successor(plan, job):
            own(self._api, job, self._made_for(plan.job))
        self._api.delete("trainjobs", name_of(plan.document), uid=plan.uid)

    def _made_for(self, job: str) -> list[tuple[str, Object]]:
        return made_for(self._api, f"{JOB_LABEL}={job}")


def _successor(plan: Plan, old: Object, job: ClusterJob) -> Object:
    """The TrainJob that goes on from the checkpoints of a stopped one."""
    metadata: Any = at(old, "metadata")
    left_out = {SUSPENDED_BY, NODES}
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
    """The plans that are kept in some of these TrainJobs."""
    return [plan for item in trainjobs if (plan := _plan(item))]


def _document(old: Object) -> Object:
    """The TrainJob for the plan of another one. If something resumes it, it ends at once: no queue is to run it."""
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
    """What the plan's annotation says."""
    data = {"old": plan.old_uid, "nodes": plan.num_nodes, "actor": plan.actor, "successor": plan.successor}
    return json.dumps(data, separators=(",", ":"))


def _plan(item: Object) -> Plan | None:
    """The plan in a TrainJob; None if it is another one, or if someone has changed it."""
    if not is_plan(item):
        return None
    job = str(texts(item, "metadata", "labels")[PLAN_LABEL])
    try:
        data = json.loads(texts(item, "metadata", "annotations")[_CONTENT])
        successor = data["successor"]
        if successor is not None and (name_of(successor) != job or not isinstance(at(successor, "spec"), dict)):
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
