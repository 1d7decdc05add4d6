"""Finds the objects of each job among all objects of a namespace. This module sends no requests."""

import re
from collections.abc import Iterable

from safepoint.jobs.cluster.changes.plans import Plan, plans_among
from safepoint.jobs.cluster.objects import Object, at, event_time, items, name_of, owners_of, texts, uid_of
from safepoint.jobs.cluster.pods.pod_fields import INITIALIZERS, JOBSET_LABEL, NODE, PART_LABEL, own_pods
from safepoint.jobs.cluster.spec import is_plan
from safepoint.jobs.cluster.state import UID_LABEL, Observed

_SECONDS = len("2026-01-01T00:00:00")


def objects_of_jobs(
    trainjobs: Iterable[Object], pods: Iterable[Object], workloads: Iterable[Object]
) -> list[Observed]:
    """The objects of each job. If `scale` has deleted the old TrainJob of a job, and has not created the new TrainJob
    yet, the new TrainJob is read from the plan."""
    trainjobs = list(trainjobs)
    plans = {plan.job: plan for plan in reversed(plans_among(trainjobs))}
    jobs = {name: plan.successor for name, plan in plans.items() if plan.successor is not None}
    jobs |= {name_of(job): job for job in trainjobs if not is_plan(job)}
    of_job: dict[str, list[Object]] = {}
    for pod in pods:
        of_job.setdefault(texts(pod, "metadata", "labels").get(JOBSET_LABEL, ""), []).append(pod)
    by_uid = {
        uid: item
        for item in workloads
        if (uid := str(texts(item, "metadata", "labels").get(UID_LABEL))) in owners_of(item)
    }
    return [
        Observed(
            trainjob=job,
            pods=own_pods(name, of_job.get(name, [])),
            workload=by_uid.get(uid_of(job)),
            target_nodes=target_of(plans.get(name), job),
        )
        for name, job in jobs.items()
    ]


def target_of(plan: Plan | None, job: Object) -> int | None:
    """The number of nodes that a plan gives to the job; None if there is no plan, or if it is already carried out.

    `job` is the TrainJob that the plan replaces, or the planned TrainJob, which has no uid yet.
    """
    return plan.num_nodes if plan is not None and uid_of(job) in {plan.old_uid, ""} else None


def parts_of(seen: Observed) -> set[str]:
    """The names that the replicated jobs of a job may have: the usual names, the names in the labels of its pods, and
    the names in the patches of its TrainJob."""
    spec = at(seen.trainjob, "spec")
    changed = [
        at(one, "name")
        for patch in items(spec, "runtimePatches")
        for one in items(patch, "trainingRuntimeSpec", "template", "spec", "replicatedJobs")
    ]
    changed += [
        at(one, "name") for patch in items(spec, "podTemplateOverrides") for one in items(patch, "targetJobs")
    ]
    found = {texts(pod, "metadata", "labels").get(PART_LABEL, "") for pod in seen.pods}
    return {NODE, *INITIALIZERS, *found, *(str(name) for name in changed if name)} - {""}


def warnings_of_job(seen: Observed, events: Iterable[Object]) -> list[Object]:
    """The events that explain why a job waits, oldest first.

    Events of an earlier job of the same name are left out: they are older than the TrainJob, or name another uid.
    """
    uid, kind = uid_of(seen.trainjob), "TrainJob"
    found = events_of_job(seen, events, since=str(at(seen.trainjob, "metadata", "creationTimestamp") or ""))
    return [
        event
        for event in found
        if at(event, "involvedObject", "kind") != kind or at(event, "involvedObject", "uid") in {None, uid}
    ]


def events_of_job(seen: Observed, events: Iterable[Object], *, since: str) -> list[Object]:
    """The events of a job and of the objects that were created for it, oldest first.

    The objects may have been deleted, so they are recognized by the names that the cluster derives from the job's
    name.

    Args:
        seen: the objects of the job.
        events: all events of the namespace.
        since: when the job was created (RFC 3339 UTC). Earlier events belong to another job of the same name.
    """
    job = name_of(seen.trainjob)
    known = {job, *map(name_of, seen.pods), name_of(seen.workload)}
    either = "|".join(map(re.escape, sorted(parts_of(seen))))
    name = re.escape(job)
    derived = {
        "Job": re.compile(rf"{name}-({either})-[0-9]+"),
        "Pod": re.compile(rf"{name}-({either})-[0-9]+-[0-9]+-[a-z0-9]{{5}}"),
        "Workload": re.compile(rf"trainjob-{name}-[0-9a-f]{{5}}"),
    }

    def is_of_job(event: Object) -> bool:
        about = str(at(event, "involvedObject", "name") or "")
        pattern = derived.get(str(at(event, "involvedObject", "kind")))
        is_derived = pattern is not None and pattern.fullmatch(about) is not None
        return (about in known or is_derived) and event_time(event)[:_SECONDS] >= since[:_SECONDS]

    return sorted(filter(is_of_job, events), key=event_time)
