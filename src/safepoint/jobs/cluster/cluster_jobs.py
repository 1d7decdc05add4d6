"""The jobs of one namespace of a cluster: submit, show, suspend, resume, delete, logs, events.

Nothing is kept on this machine. Each method leaves the cluster in a state that the next one understands, also when it
is killed: what was made for a job that never came is removed by the next command that submits.
"""

import contextlib
import getpass
import os
import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from safepoint.errors import (
    AccessDeniedError,
    ConflictError,
    NotFoundError,
    SafepointError,
    TransientError,
    WaitTimeoutError,
)
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.failures import AlreadyExistsError
from safepoint.jobs.cluster.manifests import Manifests, manifests_for
from safepoint.jobs.cluster.objects import Object, at, items, name_of, texts
from safepoint.jobs.cluster.pod_ends import JOBSET_LABEL, PodEnds
from safepoint.jobs.cluster.requirements import check_claim, check_queue, find_runtime, secret_keys
from safepoint.jobs.cluster.spec import JOB_LABEL, ClusterSpec
from safepoint.jobs.cluster.state import SUSPENDED_BY, ClusterJob, Observed, container_status, describe, node_of
from safepoint.jobs.model.records import JobEvent, JobState

_UID_LABEL = "kueue.x-k8s.io/job-uid"
_ORPHAN_S = 600
"""An object for a job that does not exist is removed when it is older than this."""
_MADE_FOR_JOBS = ("configmaps", "secrets", "trainingruntimes")
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a suspension has saved.

    Args:
        job: after it.
        safe_step: the step of the checkpoint that the job resumes from; None if none is known.
        is_saved: whether the save of this suspension has succeeded; None if it cannot be seen.
    """

    job: ClusterJob
    safe_step: int | None
    is_saved: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a pod.

    Args:
        source: `node 0`, or the name of the pod.
        text: the line.
    """

    source: str
    text: str


class ClusterJobs:
    """The jobs of one namespace.

    Args:
        api: the namespace.
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self.place = api.connection.name

    # ---- submit ---------------------------------------------------------------------------------------------------

    def manifests(self, spec: ClusterSpec) -> Manifests:
        """The objects that `submit` would create.

        Raises:
            NotFoundError: there is no such runtime, claim, Secret or queue.
            UsageError: they contradict each other.
        """
        runtime = find_runtime(self._api, spec.runtime)
        check_claim(self._api, spec)
        check_queue(self._api, spec)
        return manifests_for(
            spec,
            runtime,
            secret_keys=secret_keys(self._api, spec),
            with_secret=spec.num_nodes == 1 or self._api.may("create", "secrets"),
            with_runtime=spec.grace_s in {None, runtime.grace_s} or self._api.may("create", "trainingruntimes"),
        )

    def submit(self, spec: ClusterSpec) -> ClusterJob:
        """Create a job.

        Raises:
            ConflictError: there is a job of this name.
            AccessDeniedError: you may not create it.
        """
        if self._api.find("trainjobs", spec.name) is not None:
            raise ConflictError(
                f"there is a job {spec.name} in namespace {self._api.namespace}; nothing was submitted",
                hint="choose another name, or delete that job first",
            )
        manifests = self.manifests(spec)
        made: list[tuple[str, Object]] = []
        try:
            for kind, item in manifests.before:
                # A submit that was killed may have made it; its name is its digest, or the name of the job.
                with contextlib.suppress(AlreadyExistsError):
                    made.append((kind, self._api.create(kind, item)))
            job = self._create_job(manifests.trainjob)
        except BaseException:
            for kind, item in made:
                with contextlib.suppress(SafepointError):
                    self._api.delete(kind, name_of(item))
            raise
        self._own(job, manifests)
        return describe(Observed(trainjob=job), place=self.place)

    def _create_job(self, trainjob: Object) -> Object:
        try:
            return self._api.create("trainjobs", trainjob)
        except TransientError:  # the answer may have been lost
            found = self._api.find("trainjobs", name_of(trainjob))
            if found is None:
                raise
            return found

    def _own(self, job: Object, manifests: Manifests) -> None:
        """Make the job the owner of what was made for it, so that they are deleted together."""
        owner = {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "name": name_of(job),
            "uid": at(job, "metadata", "uid"),
        }
        for kind, item in manifests.before:
            self._api.patch(kind, name_of(item), {"metadata": {"ownerReferences": [owner]}})

    def repair(self) -> int:
        """Finish or remove what a command that was killed has left; returns the number of objects."""
        jobs = {name_of(job): job for job in self._api.objects("trainjobs", labels=JOB_LABEL)}
        num_repaired = 0
        for kind in _MADE_FOR_JOBS:
            try:
                found = self._api.objects(kind, labels=JOB_LABEL)
            except AccessDeniedError:
                continue
            for item in found:
                if items(item, "metadata", "ownerReferences"):
                    continue
                job = jobs.get(texts(item, "metadata", "labels")[JOB_LABEL])
                if job is not None:
                    self._own(job, Manifests(trainjob=job, before=((kind, item),)))
                elif clock.wall_s() - clock.parse_utc(at(item, "metadata", "creationTimestamp")) > _ORPHAN_S:
                    self._api.delete(kind, name_of(item), uid=at(item, "metadata", "uid"))
                else:
                    continue
                num_repaired += 1
        return num_repaired

    # ---- look -----------------------------------------------------------------------------------------------------

    def jobs(self) -> list[ClusterJob]:
        """All jobs of the namespace, oldest first; four requests for each 500 of them."""
        jobsets = {name_of(item): item for item in self._api.objects("jobsets")}
        pods: dict[str, list[Object]] = {}
        for pod in self._api.objects("pods", labels=JOBSET_LABEL):
            pods.setdefault(texts(pod, "metadata", "labels")[JOBSET_LABEL], []).append(pod)
        workloads = {texts(item, "metadata", "labels").get(_UID_LABEL): item for item in self._workloads("")}
        found = [
            describe(
                Observed(
                    trainjob=job,
                    jobset=jobsets.get(name_of(job)),
                    pods=pods.get(name_of(job), []),
                    workload=workloads.get(at(job, "metadata", "uid")),
                ),
                place=self.place,
            )
            for job in self._api.objects("trainjobs")
        ]
        return sorted(found, key=lambda job: job.created)

    def job(self, name: str) -> ClusterJob:
        """One job.

        Raises:
            NotFoundError: there is no such job.
        """
        return describe(self.observe(name), place=self.place)

    def observe(self, name: str) -> Observed:
        """All objects of a job.

        Raises:
            NotFoundError: there is no such job.
        """
        job = self._api.find("trainjobs", name)
        if job is None:
            raise NotFoundError(f"there is no job {name} in namespace {self._api.namespace} of cluster {self.place}")
        workloads = self._workloads(f"{_UID_LABEL}={at(job, 'metadata', 'uid')}")
        pods = self._pods(name)
        return Observed(
            trainjob=job,
            jobset=self._api.find("jobsets", name),
            pods=pods,
            workload=workloads[0] if workloads else None,
            events=[] if pods else self._warnings(name),
        )

    def _pods(self, name: str) -> list[Object]:
        return sorted(self._api.objects("pods", labels=f"{JOBSET_LABEL}={name}"), key=node_of)

    def _workloads(self, labels: str) -> list[Object]:
        with contextlib.suppress(AccessDeniedError):
            return self._api.objects("workloads", labels=labels)
        return []

    def _warnings(self, name: str) -> list[Object]:
        found: list[Object] = []
        with contextlib.suppress(AccessDeniedError):
            for kind in ("TrainJob", "JobSet"):
                fields = f"type=Warning,involvedObject.name={name},involvedObject.kind={kind}"
                found += self._api.objects("events", fields=fields)
        return sorted(found, key=_event_time)

    def events(self, name: str) -> list[JobEvent]:
        """What the cluster reports about a job and its pods, oldest first, as long as the cluster keeps it."""
        seen = self.observe(name)
        names = {name, *map(name_of, seen.pods), name_of(seen.workload)}
        found = [item for item in self._api.objects("events") if at(item, "involvedObject", "name") in names]
        return [
            JobEvent(
                time=_event_time(item),
                name=str(at(item, "reason") or ""),
                actor=str(at(item, "reportingComponent") or at(item, "source", "component") or ""),
                cause=str(at(item, "message") or ""),
                detail={"object": str(at(item, "involvedObject", "name")), "count": at(item, "count") or 1},
            )
            for item in sorted(found, key=_event_time)
        ]

    def logs(self, name: str, *, follow: bool = False, node: int | None = None) -> Iterator[LogLine]:
        """The output of a job's pods, one pod after the other; with `follow`, of the first one as it grows.

        Raises:
            NotFoundError: there is no such job, or no pod of it.
        """
        self.job(name)
        pods = [pod for pod in self._pods(name) if node is None or node_of(pod) == node]
        if not pods:
            raise NotFoundError(f"job {name} has no pods now, and their output is gone with them")
        for pod in pods[:1] if follow else pods:
            if not self._has_started(pod, follow=follow):
                continue
            container = str(at(container_status(pod), "name") or "node")
            if at(container_status(pod), "restartCount"):
                with contextlib.suppress(NotFoundError, SafepointError):
                    for line in self._api.log(name_of(pod), container, previous=True):
                        yield LogLine(source=f"node {node_of(pod)}", text=line)
            for line in self._api.log(name_of(pod), container, follow=follow):
                yield LogLine(source=f"node {node_of(pod)}", text=line)

    def _has_started(self, pod: Object, *, follow: bool) -> bool:
        """Whether the pod's container has started; with `follow`, wait for it."""
        while True:
            state = texts(container_status(pod), "state")
            if "running" in state or "terminated" in state or at(container_status(pod), "restartCount"):
                return True
            found = self._api.find("pods", name_of(pod)) if follow else None
            if found is None:
                return False
            pod = found
            clock.sleep(_LOOK_S)

    # ---- change ---------------------------------------------------------------------------------------------------

    def suspend(self, name: str, *, timeout_s: float | None = None) -> Receipt:
        """Stop a job with a checkpoint, and wait until its pods are gone.

        Raises:
            ConflictError: the job has ended or is being deleted.
            WaitTimeoutError: its pods are not gone yet; the request stays in effect.
        """
        seen = self.observe(name)
        job = describe(seen, place=self.place)
        if job.state.is_over or job.state is JobState.DELETING:
            raise ConflictError(f"job {name} cannot be suspended: it is {job.state}")
        if job.state is JobState.SUSPENDED:
            return Receipt(job=job, safe_step=job.safe_step, is_saved=None)
        deadline_s = None if timeout_s is None else clock.monotonic_s() + timeout_s
        with PodEnds(self._api, name) as ends:
            self._request_stop(seen)
            while True:
                job = self.job(name)
                if job.state.is_over or job.state is JobState.SUSPENDED:
                    break
                if deadline_s is not None and clock.monotonic_s() >= deadline_s:
                    raise WaitTimeoutError(
                        f"job {name} was not suspended within {timeout_s:g} s; it is {job.state}",
                        hint=f"the request stays in effect; `safepoint status {name}` shows when it has stopped",
                    )
                clock.sleep(_LOOK_S)
            if seen.pods:
                ends.wait_for_last()
        safe_step = ends.safe_step if ends.safe_step is not None else job.safe_step
        return Receipt(job=job, safe_step=safe_step, is_saved=ends.is_saved)

    def _request_stop(self, seen: Observed) -> None:
        """Set what stops the job: the Workload's `active` if a queue owns it, else its own `suspend`."""
        name = name_of(seen.trainjob)
        by = {"metadata": {"annotations": {SUSPENDED_BY: actor()}}}
        if seen.workload is not None:
            try:
                self._api.patch("workloads", name_of(seen.workload), {"spec": {"active": False}})
            except AccessDeniedError:
                self._api.patch("trainjobs", name, {**by, "spec": {"suspend": True}})
            else:
                self._api.patch("trainjobs", name, by)
            return
        self._api.patch("trainjobs", name, {**by, "spec": {"suspend": True}})

    def resume(self, name: str) -> ClusterJob:
        """Let a suspended job go on from its newest checkpoint.

        Raises:
            ConflictError: the job is not suspended.
        """
        seen = self.observe(name)
        job = describe(seen, place=self.place)
        if job.state not in {JobState.SUSPENDED, JobState.SUSPENDING}:
            hint = "submit it again" if job.state.is_over else f"`safepoint logs -f {name}` shows its output"
            raise ConflictError(f"job {name} is {job.state}, not suspended", hint=hint)
        released: Object = {"metadata": {"annotations": {SUSPENDED_BY: None}}}
        if seen.workload is not None:
            if at(seen.workload, "spec", "active") is False:
                self._api.patch("workloads", name_of(seen.workload), {"spec": {"active": True}})
        else:
            released["spec"] = {"suspend": False}
        self._api.patch("trainjobs", name, released)
        return self.job(name)

    def delete(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete a job and what was made for it, and wait until it is gone; its checkpoints stay."""
        uid = self.job(name).uid
        self._api.delete("trainjobs", name, uid=uid)
        deadline_s = None if timeout_s is None else clock.monotonic_s() + timeout_s
        while at(self._api.find("trainjobs", name), "metadata", "uid") == uid:
            if deadline_s is not None and clock.monotonic_s() >= deadline_s:
                raise WaitTimeoutError(
                    f"job {name} was not deleted within {timeout_s:g} s", hint="the request stays in effect"
                )
            clock.sleep(_LOOK_S)

    def wait(
        self,
        name: str,
        states: Collection[JobState],
        *,
        timeout_s: float | None = None,
        poll_s: float = _LOOK_S,
        look: Callable[[ClusterJob], None] = lambda job: None,
    ) -> ClusterJob:
        """Wait until a job is in one of the states.

        Raises:
            SafepointError: the job has failed, or is complete, and that was not waited for.
            WaitTimeoutError: it did not reach a state in time.
        """
        deadline_s = None if timeout_s is None else clock.monotonic_s() + timeout_s
        while True:
            job = self.job(name)
            look(job)
            if job.state in states:
                return job
            if job.state.is_over:
                raise SafepointError(f"job {name} is {job.state}" + (f": {job.message}" if job.message else ""))
            if deadline_s is not None and clock.monotonic_s() >= deadline_s:
                expected = " or ".join(sorted(map(str, states)))
                raise WaitTimeoutError(f"job {name} was not {expected} within {timeout_s:g} s; it is {job.state}")
            clock.sleep(poll_s)


def actor() -> str:
    """Who uses this command: user and host, for people who wonder later."""
    with contextlib.suppress(KeyError, OSError):
        return f"{getpass.getuser()}@{socket.gethostname()}"
    return f"uid {os.getuid()}@{socket.gethostname()}"


def _event_time(item: Object) -> str:
    for key in ("lastTimestamp", "eventTime", "firstTimestamp"):
        if at(item, key):
            return str(at(item, key))
    return str(at(item, "metadata", "creationTimestamp") or datetime.now(UTC).isoformat())
