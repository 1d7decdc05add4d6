"""A job gets another number of nodes: a new TrainJob of its name succeeds it, as `spec.trainer` cannot be changed.

A plan of this lies in the cluster until the successor exists: a config map that no job owns. Every command that
looks at the job carries the plan on, one step at a time, and each step may be done twice:

1. The plan is written, with the id of the old TrainJob.
2. The old one is stopped, with a checkpoint.
3. The plan receives the whole successor, and owns what was made for the job (its program, its Secret, its runtime).
4. The old one is deleted.
5. The successor is created, and owns what was made for the job. The plan is deleted.
"""

import contextlib
import copy
import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from safepoint.errors import AccessDeniedError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.submission import create, made_for, own
from safepoint.jobs.cluster.failures import AlreadyExistsError
from safepoint.jobs.cluster.manifests import add_secret, mounts_secret
from safepoint.jobs.cluster.objects import Object, at, items, name_of, texts, uid_of
from safepoint.jobs.cluster.spec import DOMAIN, JOB_LABEL, RECORD, read_record
from safepoint.jobs.cluster.state import (
    CREATED,
    HISTORY,
    NODES,
    SAFE_STEP,
    SUSPENDED_BY,
    ClusterJob,
    attempts_before,
)
from safepoint.jobs.model.records import AttemptRecord

_LABEL = f"{DOMAIN}/successor-of"
_PLAN = f"{DOMAIN}/plan"
"""The annotation of a successor with the id of its plan."""
_KUEUE = "kueue.x-k8s.io"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A TrainJob of the same name that is about to come.

    Args:
        document: the config map.
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

    def plans(self) -> list[Plan]:
        """All plans; none without the right to look for them."""
        with contextlib.suppress(AccessDeniedError):
            return [plan for item in self._api.objects("configmaps", labels=_LABEL) if (plan := _plan(item))]
        return []

    def plan(self, job: str) -> Plan | None:
        """The plan of a job; None without one, or without the right to look for it."""
        with contextlib.suppress(AccessDeniedError):
            found = self._api.find("configmaps", _name(job))
            return None if found is None else _plan(found)
        return None

    def write(self, job: Object, num_nodes: int, *, actor: str) -> Plan:
        """Write the plan for a job; a plan that exists for it gets this number of nodes."""
        data = {"old": uid_of(job), "nodes": str(num_nodes), "actor": actor}
        metadata = {"name": _name(name_of(job)), "labels": {_LABEL: name_of(job)}}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        try:
            written = create(self._api, "configmaps", body)
        except AlreadyExistsError:
            written = self._api.patch("configmaps", _name(name_of(job)), {"data": data})
        plan = _plan(written)
        assert plan is not None
        return plan

    def drop(self, plan: Plan) -> None:
        """Give up a plan. What it owns goes back to the old TrainJob while that exists, and is deleted otherwise."""
        old = self._api.find("trainjobs", plan.job)
        if old is not None and uid_of(old) == plan.old_uid:
            own(self._api, old, self._made_for(plan.job))
        self._api.delete("configmaps", name_of(plan.document), uid=plan.uid)

    def release(self, plan: Plan, old: Object, job: ClusterJob) -> None:
        """Delete the old TrainJob, which has stopped. Its successor is written down first."""
        if plan.successor is None:
            successor = _successor(plan, old, job)
            if plan.num_nodes > 1 and not mounts_secret(successor) and self._api.may("create", "secrets"):
                successor, secret = add_secret(successor)
                with contextlib.suppress(AlreadyExistsError):
                    create(self._api, "secrets", secret)
            self._api.patch("configmaps", name_of(plan.document), {"data": {"successor": json.dumps(successor)}})
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
        self._api.delete("configmaps", name_of(plan.document), uid=plan.uid)

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
        "metadata": {"name": name_of(old), "labels": texts(metadata, "labels"), "annotations": notes},
        "spec": spec,
    }


def _name(job: str) -> str:
    return f"{job}-successor"


def _plan(item: Object) -> Plan | None:
    """The plan in a config map; None if it is another one, or if someone has changed it."""
    data = texts(item, "data")
    try:
        job = texts(item, "metadata", "labels")[_LABEL]
        successor = json.loads(data["successor"]) if "successor" in data else None
        if successor is not None and name_of(successor) != job:
            return None
        return Plan(
            document=item,
            job=job,
            old_uid=data["old"],
            num_nodes=int(data["nodes"]),
            actor=data["actor"],
            successor=successor,
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
