"""Changes a job's number of nodes: a new TrainJob of the same name, its successor, replaces the old one.

The old TrainJob cannot be changed, because Kubernetes refuses changes of `spec.trainer`. Until the successor exists,
the cluster keeps a plan for it (`plans`) in a further TrainJob. This further TrainJob is suspended and does nothing.
The plan is kept in a TrainJob so that only people who may create TrainJobs can create a plan. The command that wrote
the plan carries the plan out, and holds the lease of the plan meanwhile (`plan_lease`). When the lease is free, other
commands carry out the next steps. Each step may be carried out twice without harm. The steps are:

1. Write the plan: the uid of the old TrainJob, and the whole successor, which is made from the old TrainJob.
2. Stop the old TrainJob, with a checkpoint.
3. Record in the plan how the old TrainJob has ended. Make the TrainJob of the plan a second owner of the objects that
   were made for the job (its program, its Secret, its runtime).
4. Delete the old TrainJob.
5. When the JobSet and the pods of the old TrainJob are gone too, create the successor. Make the successor the owner
   of the objects that were made for the job, and delete the plan.

The notes of step 3 are only shown to people; no decision depends on them. While the old TrainJob exists, each step
compares the successor with the old TrainJob, and drops a plan that would change more than the number of nodes.
"""

import contextlib
import copy
import dataclasses
import json
import logging
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from safepoint.errors import AccessDeniedError, ConflictError, UsageError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.made_objects import made_for
from safepoint.jobs.cluster.changes.plans import ENDED, Plan, changed_among, document_of, plans_among, read_plan
from safepoint.jobs.cluster.changes.submission import MARK, create, own, reference_to
from safepoint.jobs.cluster.manifests import lacks_secret, mounted_secret, with_secret
from safepoint.jobs.cluster.objects import Object, at, items, name_of, texts, uid_of
from safepoint.jobs.cluster.pods.pod_secrets import nodes_secret
from safepoint.jobs.cluster.records.pod_image import IMAGE
from safepoint.jobs.cluster.records.receipts import RECEIPT
from safepoint.jobs.cluster.spec import PLAN_LABEL, RECORD, read_record
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

_MOST_BYTES = (256 << 10) - (8 << 10)
"""The size limit of a plan: Kubernetes' limit for all annotations of an object, minus 8 KiB for the notes that are
added to the plan later."""
_KUEUE = "kueue.x-k8s.io"
_log = logging.getLogger("safepoint")


class Successions:
    """The plans of one namespace.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._reported: set[str] = set()

    def plan(self, job: str) -> Plan | None:
        """The plan for a job; None if there is none, or if you may not read TrainJobs."""
        self._api.check_name(job)
        with contextlib.suppress(AccessDeniedError):
            found = self._api.objects("trainjobs", labels=f"{PLAN_LABEL}={job}")
            self.report_changed(found)
            return next((plan for plan in plans_among(found) if plan.job == job), None)
        return None

    def report_changed(self, trainjobs: Iterable[Object]) -> None:
        """Log one warning for each plan in these TrainJobs that another person has changed."""
        for item in changed_among(trainjobs):
            name, job = name_of(item), texts(item, "metadata", "labels").get(PLAN_LABEL, "")
            if name not in self._reported:
                self._reported.add(name)
                _log.warning(
                    "someone changed the plan to scale job %s after Safepoint wrote the plan, so the job is not "
                    "scaled; the plan is stored in TrainJob %s, and `kubectl delete trainjob %s -n %s` deletes the "
                    "plan; if job %s no longer exists, this also deletes what was made for the job: submit it again "
                    "with the same --output-dir",
                    job,
                    name,
                    name,
                    self._api.namespace,
                    job,
                )

    def write(self, old: Object, job: ClusterJob, num_nodes: int, *, notes: Mapping[str, str] | None = None) -> Plan:
        """Write a plan for a job that has no plan.

        Args:
            old: the job's TrainJob.
            job: the job.
            num_nodes: the new number of nodes.
            notes: further annotations of the TrainJob that keeps the plan; None adds no further annotations.

        Raises:
            UsageError: the plan would be larger than the annotations of a TrainJob can be.
            AccessDeniedError: you may not create what the successor needs.
            ConflictError: another person changed the TrainJob that keeps the plan, right after it was created.
        """
        actor = this_user()
        planned = _successor(old, num_nodes, created=job.created)
        secret = None
        if num_nodes > 1 and lacks_secret(planned) and self._api.may("create", "secrets"):
            secret = nodes_secret(job.name)
            secret["metadata"]["ownerReferences"] = [reference_to(old)]
            planned = with_secret(planned, name_of(secret))
        content = json.dumps(
            {
                "old": uid_of(old),
                "nodes": num_nodes,
                "actor": actor,
                "successor": planned,
                # Without this random text, a person who may change the old TrainJob could construct two texts with
                # the same digest.
                "unique": secrets.token_hex(16),
            },
            separators=(",", ":"),
        )
        size = len(content) + len(json.dumps(_notes_at_end(old, job, actor, num_nodes, now=clock.utc_now())))
        if size > _MOST_BYTES:
            raise UsageError(
                f"job {job.name} was not scaled: the description of its new TrainJob has {size:,} bytes, and "
                f"a TrainJob has room for {_MOST_BYTES:,}",
                hint="suspend the job, and submit it again with another number of nodes",
            )
        if secret is not None:
            create(self._api, "secrets", secret)
        document = document_of(old, content)
        document["metadata"]["annotations"] |= notes or {}
        try:
            written = read_plan(create(self._api, "trainjobs", document))
        except AlreadyExistsError:  # an earlier try, whose reply was lost, has created the TrainJob
            written = read_plan(self._api.get("trainjobs", name_of(document)))
        if written is None:
            raise ConflictError(
                f"job {job.name} was not scaled: TrainJob {name_of(document)}, which stores the plan for the "
                "scaling, was changed right after Safepoint had created it",
                hint=f"`kubectl delete trainjob {name_of(document)} -n {self._api.namespace}` deletes this TrainJob; "
                "then scale the job once more",
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
        self._delete(plan)

    def check(self, plan: Plan, old: Object) -> None:
        """Drop a plan that would change more than the number of nodes of the old TrainJob.

        Raises:
            ConflictError: the plan would change more, and was dropped.
        """
        if not _is_made_from(plan, old):
            self.drop(plan)
            raise ConflictError(
                f"job {plan.job} was not scaled to {plan.num_nodes} nodes: its TrainJob was changed meanwhile, or "
                "another program than Safepoint wrote the plan for the scaling",
                hint=f"`kubectl get trainjob {plan.job} -n {self._api.namespace} -o yaml` shows the TrainJob; then "
                "resume or scale the job once more",
            )

    def release(self, plan: Plan, old: Object, job: ClusterJob) -> None:
        """Note in the plan how the old TrainJob has stopped, and delete the old TrainJob."""
        notes = json.dumps(_notes_at_end(old, job, plan.actor, plan.num_nodes, now=clock.as_utc(self._api.now_s())))
        self._api.patch("trainjobs", name_of(plan.document), {"metadata": {"annotations": {ENDED: notes}}})
        # The old TrainJob stays an owner until it is deleted. So if a person deletes the plan before that, the
        # cluster keeps the objects that the old TrainJob needs.
        own(self._api, plan.document, self._made_for(plan), beside=old)
        self._api.delete("trainjobs", plan.job, uid=plan.old_uid)

    def create(self, plan: Plan) -> None:
        """Create the successor. Do nothing if `release` was not called for this plan. The old TrainJob must be
        gone."""
        if plan.successor is not None:
            with contextlib.suppress(AlreadyExistsError):
                create(self._api, "trainjobs", plan.successor)

    def finish(self, plan: Plan, job: Object) -> None:
        """Make `job`, which has replaced the old TrainJob, the owner of the job's objects, and delete the plan."""
        own(self._api, job, self._made_for(plan))
        self._delete(plan)

    def _delete(self, plan: Plan) -> None:
        self._api.delete("trainjobs", name_of(plan.document), uid=plan.uid)

    def _made_for(self, plan: Plan) -> list[tuple[str, Object]]:
        return made_for(self._api, plan.job, owners={plan.old_uid, plan.uid})


def _successor(old: Object, num_nodes: int, *, created: str) -> Object:
    """Make the new TrainJob from the old TrainJob, which may still run. The new TrainJob resumes from the checkpoints
    of the old TrainJob."""
    metadata: Any = at(old, "metadata")
    left_out = {SUSPENDED_BY, NODES, RECEIPT, IMAGE, MARK}
    notes = {key: text for key, text in texts(metadata, "annotations").items() if key not in left_out}
    notes[CREATED] = created
    record = read_record(notes.get(RECORD))
    if record:
        notes[RECORD] = json.dumps({**record, "num_nodes": num_nodes}, sort_keys=True)
    spec: Any = copy.deepcopy(at(old, "spec"))
    spec.pop("suspend", None)
    spec["trainer"] = {**(at(spec, "trainer") or {}), "numNodes": num_nodes}
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


def _notes_at_end(old: Object, job: ClusterJob, actor: str, num_nodes: int, *, now: str) -> dict[str, str]:
    """The annotations of the successor about the attempts before it, and about the newest checkpoint."""
    ended = AttemptRecord(
        number=max(1, job.attempt),
        num_nodes=int(at(old, "spec", "trainer", "numNodes") or 1),
        started=str(at(old, "metadata", "creationTimestamp")),
        ended=now,
        outcome=f"Suspended: {actor} changed the number of nodes to {num_nodes}",
    )
    notes = {HISTORY: json.dumps([dataclasses.asdict(attempt) for attempt in (*attempts_before(old), ended)])}
    if job.safe_step is not None:
        notes[SAFE_STEP] = str(job.safe_step)
    return notes


def _is_made_from(plan: Plan, old: Object) -> bool:
    """Whether the successor does the same as the old TrainJob, on another number of nodes."""
    expected, secret = _successor(old, plan.num_nodes, created=""), mounted_secret(plan.planned)
    if secret is not None and lacks_secret(expected):
        if not re.fullmatch(rf"{re.escape(plan.job)}-nodes-[0-9a-f]{{8}}", secret):
            return False
        expected = with_secret(expected, secret)
    return expected["spec"] == plan.planned["spec"]
