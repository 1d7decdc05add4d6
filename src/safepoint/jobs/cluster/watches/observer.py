"""Reads the objects of jobs from the API server, with the events that explain why a job waits."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace

from safepoint.errors import AccessDeniedError, StorageError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import Object, at, event_time, name_of, owners_of, texts, uid_of
from safepoint.jobs.cluster.pods.pod_fields import (
    JOBSET_LABEL,
    PART_LABEL,
    is_training_pod,
    node_of,
    own_pods,
    runs_or_is_done,
)
from safepoint.jobs.cluster.spec import is_plan
from safepoint.jobs.cluster.state import UID_LABEL, Observed, state_of
from safepoint.jobs.cluster.watches.job_objects import parts_of, warnings_of_job
from safepoint.jobs.model.states import JobState

_MAY_WAIT = {JobState.STARTING, JobState.RESUMING, JobState.RESTARTING, JobState.INADMISSIBLE}
_MOST_PODS = 3
"""The events are requested for at most this number of pods that do not run."""


class Observer:
    """Reads the objects of the jobs of one namespace.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        unknown: returns the exception for a job that does not exist.
    """

    def __init__(self, api: ClusterApi, unknown: Callable[[str], Exception]) -> None:
        self._api, self._unknown = api, unknown

    def observe(self, name: str) -> Observed:
        """The objects of a job: its TrainJob, pods and Workload. If the job does not run yet: also events.

        Raises:
            NotFoundError: there is no such job.
        """
        job = self._api.find("trainjobs", name)
        if job is None or is_plan(job):
            raise self._unknown(name)
        listed = self.workloads(f"{UID_LABEL}={uid_of(job)}")
        workloads = [item for item in listed if uid_of(job) in owners_of(item)]
        seen = Observed(trainjob=job, pods=self.pods(name), workload=workloads[0] if workloads else None)
        return self.explained(seen) if _may_wait(seen) else seen

    def pods(self, name: str) -> list[Object]:
        """The pods of a job, in the order of their indexes."""
        return sorted(own_pods(name, self._api.objects("pods", labels=f"{JOBSET_LABEL}={name}")), key=node_of)

    def workloads(self, labels: str) -> list[Object]:
        """The Workloads that the selector chooses; none if you may not list them."""
        with contextlib.suppress(AccessDeniedError):
            return self._api.objects("workloads", labels=labels)
        return []

    def explained(self, seen: Observed) -> Observed:
        """The objects of one job, with the events that may explain why the job does not run."""
        found: list[Object] = []
        with contextlib.suppress(AccessDeniedError):
            for name, kinds in _asked(seen):
                fields = f"involvedObject.name={name}"
                events = self._api.objects("events", fields=fields)
                found += (event for event in events if at(event, "involvedObject", "kind") in kinds)
        return replace(seen, events=sorted(warnings_of_job(seen, found), key=event_time))

    def all_explained(self, observed: Iterable[Observed]) -> list[Observed]:
        """The objects of several jobs. Jobs that do not run yet get their warnings. This sends at most one
        request."""
        listed = list(observed)
        if not any(map(_may_wait, listed)):
            return listed
        with contextlib.suppress(AccessDeniedError):
            found = self._api.objects("events", fields="type=Warning")
            return [
                replace(seen, events=warnings_of_job(seen, found)) if _may_wait(seen) else seen for seen in listed
            ]
        return listed


def names_of_jobs(api: ClusterApi) -> list[str]:
    """The names of all jobs of the namespace; none if they cannot be listed."""
    with contextlib.suppress(StorageError):
        listed = api.objects("trainjobs", has_content=False)
        return [name_of(job) for job in listed if not is_plan(job)]
    return []


def _may_wait(seen: Observed) -> bool:
    return state_of(seen)[0] in _MAY_WAIT


def _asked(seen: Observed) -> list[tuple[str, set[str]]]:
    """The objects whose events may explain why a job does not run: each name, and the kinds with this name."""
    job = name_of(seen.trainjob)
    waiting = [pod for pod in seen.pods if not runs_or_is_done(pod)][:_MOST_PODS]
    found: list[tuple[str, set[str]]] = [(name_of(pod), {"Pod"}) for pod in waiting]
    have_pods = {texts(pod, "metadata", "labels").get(PART_LABEL, "") for pod in seen.pods}
    if not any(map(is_training_pod, seen.pods)):
        found.append((job, {"TrainJob", "JobSet"}))
    needed = {part.partition("-")[0] for part in texts(seen.trainjob, "spec", "initializer")}
    for part in sorted(parts_of(seen)):
        kind = part.removesuffix("-initializer")
        is_needed = kind == part or kind in needed
        if is_needed and (part not in have_pods or kind == part):
            found.append((f"{job}-{part}-0", {"Job"}))
    return found
