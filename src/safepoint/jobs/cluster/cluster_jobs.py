"""The jobs of one namespace of a cluster: submit, show, suspend, resume, scale, delete, logs, events.

This machine keeps no records of the jobs. If a command is killed, later commands complete or undo its work. A killed
`submit` may leave objects without a TrainJob: later calls of `submit` delete those that are older than ten minutes. A
killed `scale` is continued by the next command that reads the job (`suspension.scaling`).
"""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.errors import (
    AccessDeniedError,
    ConflictError,
    NotFoundError,
    SafepointError,
    WaitTimeoutError,
)
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.plans import plans_among
from safepoint.jobs.cluster.changes.submission import create_job, is_gone, own_left, repair
from safepoint.jobs.cluster.changes.successor import Successions
from safepoint.jobs.cluster.changes.trainer_releases import form_for
from safepoint.jobs.cluster.checks.requirements import (
    check_scaled,
    check_trainer,
    find_runtime,
    manifests_of,
    needs_of,
)
from safepoint.jobs.cluster.helper.code_upload import put_code
from safepoint.jobs.cluster.helper.job_removal import check_keeps_checkpoints, delete_checkpoints
from safepoint.jobs.cluster.helper.job_storage import JobStorage, list_in_pod, location_of, open_store_of, storage_of
from safepoint.jobs.cluster.manifests import Manifests
from safepoint.jobs.cluster.objects import Object, at, event_time, name_of, texts, uid_of
from safepoint.jobs.cluster.pods.pod_fields import JOBSET_LABEL, is_training_pod, node_of
from safepoint.jobs.cluster.pods.rank_places import num_ranks_per_node, place_of_rank
from safepoint.jobs.cluster.records.pod_image import PodImage
from safepoint.jobs.cluster.records.submitted_record import read_submitted
from safepoint.jobs.cluster.spec import ClusterSpec, is_plan
from safepoint.jobs.cluster.state import NODES, ClusterJob, Observed, describe
from safepoint.jobs.cluster.suspension.freezing import freeze_job
from safepoint.jobs.cluster.suspension.remaining_pods import RemainingPods
from safepoint.jobs.cluster.suspension.resuming import check_can_resume, image_to_thaw, release
from safepoint.jobs.cluster.suspension.scaling import Scaling
from safepoint.jobs.cluster.suspension.stop import stop_job, wait_until
from safepoint.jobs.cluster.watches.details import details_of, progress_in_log
from safepoint.jobs.cluster.watches.job_objects import events_of_job, objects_of_jobs, target_of
from safepoint.jobs.cluster.watches.job_watch import JobWatch
from safepoint.jobs.cluster.watches.observer import Observer, names_of_jobs
from safepoint.jobs.cluster.watches.pod_logs import follow_pods, read_pods
from safepoint.jobs.cluster.watches.pod_memory import PodMemory
from safepoint.jobs.cluster.watches.safe_points import SafePoints
from safepoint.jobs.model.job_place import LogLine, UnknownJobError
from safepoint.jobs.model.records import AttemptRecord, JobEvent
from safepoint.jobs.model.spec import names_of_secrets
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import Progress

_log = logging.getLogger("safepoint")
_LOOK_S = 1.0
_LOOK_AT_LEAST_S = 10.0
"""After this time, `watch` yields the jobs again even if no job has changed, because the ages of the jobs grow."""


class ClusterJobs:
    """The jobs of one namespace.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        is_read_only: if True, the methods that read jobs change nothing. If False, these methods continue a `scale`
            that was interrupted, and `watch` writes saved steps into TrainJobs (see `SafePoints`).
    """

    def __init__(self, api: ClusterApi, *, is_read_only: bool = False) -> None:
        self._api, self._is_read_only = api, is_read_only
        self._successions = Successions(api)
        self._observer = Observer(api, self._unknown)
        self._memory = PodMemory(api)
        self.place = api.connection.name
        self._scaling = Scaling(api, self._successions, self.observe, place=self.place)
        self._last_described: dict[str, tuple[Observed, ClusterJob]] = {}

    def __enter__(self) -> "ClusterJobs":
        return self

    def __exit__(self, *exception: object) -> None:
        self._api.close()

    # ---- submit ---------------------------------------------------------------------------------------------------

    def manifests(self, spec: ClusterSpec) -> Manifests:
        """The objects that `submit` would create; see `manifests_of`."""
        return manifests_of(self._api, spec)

    def preview(self, spec: ClusterSpec) -> list[Object]:
        """The objects that `submit` would create, in the form that the cluster's Trainer takes; see `manifests`."""
        found, runtime = self.manifests(spec), find_runtime(self._api, spec.runtime)
        reference = {"name": spec.runtime, "kind": str(at(runtime.document, "kind"))}
        return replace(found, trainjob=form_for(self._api, found.trainjob, runtime=reference)).documents

    def submit(self, spec: ClusterSpec) -> ClusterJob:
        """Create a job.

        Raises:
            ConflictError: a job of this name exists already, or the claim (volume) or a quota does not allow the job.
            AccessDeniedError: you may not create the objects of the job.
        """
        with self._api.asked_ahead([("trainjobs", spec.name), *needs_of(spec)]):
            known = repair(self._api)
            found = self._api.find("trainjobs", spec.name)
            if (
                found is not None or known is None or spec.name in known
            ):  # a job that is being scaled may have a config map, but no TrainJob
                self._scaling.carry_on(spec.name)
                found = self._api.find("trainjobs", spec.name)
            if found is not None:
                raise ConflictError(
                    f"there is a job {spec.name} in namespace {self._api.namespace}; nothing was submitted",
                    hint="choose another name, or delete that job first",
                )
            doubtful = names_of_secrets(spec.env)
            if doubtful:
                _log.warning(
                    "env has %s, which all readers of the TrainJob can see: use a Secret", ", ".join(doubtful)
                )
            manifests = manifests_of(self._api, spec, asks=False)
        if manifests.code is not None:
            put_code(self._api, spec, manifests.code)
        try:
            created = create_job(self._api, manifests)
        except AccessDeniedError:
            allowed = self.manifests(spec)
            if len(allowed.before) == len(manifests.before):
                raise
            created = create_job(self._api, allowed)
        job = describe(Observed(trainjob=created), place=self.place)
        if spec.grace_s not in {None, job.grace_s}:
            _log.warning(
                "job %s has the grace period of its runtime, %g s, and not %d s, because you are not allowed to "
                "create TrainingRuntimes",
                job.name,
                job.grace_s,
                spec.grace_s,
            )
        return job

    # ---- look -----------------------------------------------------------------------------------------------------

    def jobs(self) -> list[ClusterJob]:
        """All jobs of the namespace, oldest first. Each request reads at most 500 objects.

        Raises:
            NotFoundError: the cluster has no Kubeflow Trainer.
        """
        listed = self._api.objects("trainjobs")
        if not listed:
            check_trainer(self._api)
        self._successions.report_changed(listed)
        # `try_step` may have created or deleted TrainJobs.
        if not self._is_read_only and [self._scaling.try_step(plan) for plan in plans_among(listed)]:
            listed = self._api.objects("trainjobs")
        pods = self._api.objects("pods", labels=JOBSET_LABEL)
        found = objects_of_jobs(listed, pods, self._observer.workloads(""))
        return self._described(self._observer.all_explained(found))

    def _described(self, observed: Iterable[Observed]) -> list[ClusterJob]:
        """The jobs that these objects describe, oldest first. If the objects of a job have not changed since the last
        call, the same ClusterJob is returned."""
        before, self._last_described = self._last_described, {}
        for seen in observed:
            name = name_of(seen.trainjob)
            known = before.get(name)
            if known is None or known[0] != seen:
                known = seen, describe(seen, place=self.place)
            self._last_described[name] = known
        return sorted((job for _, job in self._last_described.values()), key=lambda job: job.created)

    def summaries(self) -> list[ClusterJob]:
        """All jobs of the namespace, oldest first."""
        return self.jobs()

    def job(self, name: str) -> ClusterJob:
        """One job.

        Raises:
            NotFoundError: there is no such job.
        """
        plan = self._successions.plan(name)
        if plan is not None and not self._is_read_only and self._scaling.try_step(plan):
            plan = None
        try:
            seen = self.observe(name)
        except NotFoundError:
            if plan is None or (plan := self._successions.plan(name)) is None or plan.successor is None:
                raise
            seen = Observed(trainjob=plan.successor)
        return describe(replace(seen, target_nodes=target_of(plan, seen.trainjob)), place=self.place)

    def progress_of(self, job: ClusterJob) -> Progress | None:
        """The progress that the job's pods have posted to the cluster; None if they have posted no progress."""
        return job.progress

    def output_of(self, job: ClusterJob) -> str | None:
        """The job's output location; None if it is unknown, as for a job that Safepoint did not submit."""
        return job.output

    def storage_of(self, name: str) -> JobStorage:
        """Where a job saves, and with which keys; see `job_storage.storage_of`.

        Raises:
            NotFoundError: there is no such job.
            ConflictError: the location is not certain, for example because another person has changed the job.
        """
        return storage_of(self._api, self.observe(name).trainjob)

    def inventory_of(self, name: str) -> Inventory | None:
        """A job's checkpoints in its object store; see `open_store_of`."""
        return open_store_of(self._api, self.observe(name).trainjob)

    def checkpoints_in_pod(self, name: str) -> list[dict[str, Any]]:
        """The checkpoints of a job, as `safepoint checkpoints list --json` prints them in a pod; see `list_in_pod`.

        Raises:
            NotFoundError: there is no such job, or its output location is unknown.
            ConflictError: the location is not certain, or the job saves inside its pods.
        """
        storage = self.storage_of(name)
        if storage.output is None:
            raise NotFoundError(
                f"the output location of job {name} is unknown; nothing was read", hint="submit with --output-dir"
            )
        return list_in_pod(self._api, storage, location_of(storage.output, name))

    def attempts(self, name: str) -> list[AttemptRecord]:
        """The attempts of a job, oldest first; see `ClusterJob.attempts`."""
        return list(self.job(name).attempts)

    def details_of(self, job: ClusterJob) -> dict[str, Any]:
        """The details that need further requests (see `details.details_of`), and `memory` (see `MemoryUse`)."""
        memory = self._memory.of(job).to_document()
        return {**details_of(self._api, job, self._observer.pods), "memory": memory}

    def progress_in_log(self, job: ClusterJob) -> Progress | None:
        """The progress according to the output of the job's first pod, see `progress_in`; None if it is unknown."""
        return progress_in_log(self._api, job)

    def remark_on(self, job: ClusterJob) -> str:
        """Always empty: a job on a cluster needs no cores of this machine."""
        return ""

    def observe(self, name: str) -> Observed:
        """The objects of a job: its TrainJob, pods and Workload. If the job does not run yet: also events.

        Raises:
            NotFoundError: there is no such job.
        """
        return self._observer.observe(name)

    def watch(self, name: str | None, *, interval_s: float) -> Iterator[list[ClusterJob]]:
        """Yield the active jobs, or one job, after each change; see `JobPlace.watch`.

        If nothing changes, the jobs are yielded again after `interval_s` plus 10 s.
        """
        before: set[str] = set()
        found = self.jobs() if name is None else [self.job(name)]
        safe_points = SafePoints(self._api)
        with JobWatch(self._api) as watch:
            while True:
                observed = self._observer.all_explained(watch.jobs())
                found = self._described(observed)
                for seen in [] if self._is_read_only else observed:
                    safe_points.keep(seen)
                if name is None:
                    found = [job for job in found if job.state.is_active or job.name in before]
                    before = {job.name for job in found if job.state.is_active}
                else:  # while `scale` replaces a TrainJob, there is no TrainJob of this name for a moment
                    found = [job for job in found if job.name == name] or [self.job(name)]
                yield found
                if name is not None and not found[0].state.is_active:
                    return
                clock.sleep(interval_s)
                watch.wait(_LOOK_AT_LEAST_S)

    def events(self, name: str) -> list[JobEvent]:
        """A job's events: one event for each sentence in `ClusterJob.planned`, then the events in the cluster, oldest
        first. The cluster deletes old events."""
        seen = self.observe(name)
        job = describe(seen, place=self.place)
        found = events_of_job(seen, self._api.objects("events"), since=job.created)
        planned = [
            JobEvent(time=job.created, name="Planned", actor="safepoint", cause=text, detail={})
            for text in job.planned
        ]
        return planned + [
            JobEvent(
                time=event_time(item),
                name=str(at(item, "reason") or ""),
                actor=str(at(item, "reportingComponent") or at(item, "source", "component") or ""),
                cause=str(at(item, "message") or ""),
                detail={"object": str(at(item, "involvedObject", "name")), "count": at(item, "count") or 1},
            )
            for item in found
        ]

    def logs(
        self,
        name: str,
        *,
        rank: int | None = None,
        node: int | None = None,
        follow: bool = False,
        last_bytes: int | None = None,
    ) -> Iterator[LogLine]:
        """The output of a job's pods, pod after pod; with `follow`, see `follow_pods`.

        Args:
            name: the job.
            rank: yield the output of the pod that this rank runs in. A pod does not separate the lines of its ranks.
            node: without `rank`: yield only the output of this node; None yields the output of all nodes.
            follow: continue with new lines, until the job has stopped.
            last_bytes: without `follow`: yield only the end of each container's output, about this many bytes.

        Raises:
            NotFoundError: there is no such job, pod or rank.
            UsageError: it is not known which node the rank runs on.
        """
        if rank is not None:
            seen = self.observe(name)
            known = read_submitted(seen.trainjob)
            recorded, num_nodes = None if known is None else known.ranks_per_node, self.job(name).num_nodes
            node = place_of_rank(rank, seen.trainjob, seen.pods, num_nodes=num_nodes, recorded=recorded)
            in_pod = num_ranks_per_node(seen.trainjob, seen.pods, recorded=recorded)
            if in_pod != 1:
                _log.warning(
                    "the output of rank %d is mixed with the output of all ranks in the pod of node %d", rank, node
                )

        def look() -> tuple[JobState, list[Object]]:
            return self.job(name).state, [
                pod for pod in self._observer.pods(name) if is_training_pod(pod) and node in {None, node_of(pod)}
            ]

        yield from follow_pods(self._api, look) if follow else read_pods(self._api, look, last_bytes=last_bytes)

    # ---- change ---------------------------------------------------------------------------------------------------

    def suspend(self, name: str, *, timeout_s: float | None = None) -> ClusterJob:
        """Save a checkpoint of a job, stop the job, and wait until its pods are gone; see `stop_job`.

        Raises:
            ConflictError: the job has ended or is being deleted.
            AccessDeniedError: you may not stop the job, see `check_may_stop`.
            WaitTimeoutError: the pods are not gone yet. The cluster continues to stop the job.
        """
        self._scaling.carry_on(name, timeout_s=timeout_s)
        return stop_job(self._api, lambda: self.observe(name), place=self.place, timeout_s=timeout_s)

    def freeze(
        self, name: str, *, is_running_after: bool, timeout_s: float | None = None
    ) -> tuple[ClusterJob, PodImage]:
        """Make a process image of a job's pod. Without `is_running_after`, suspend the job; see `freeze_job`."""
        self._scaling.carry_on(name, timeout_s=timeout_s)
        return freeze_job(
            self._api, lambda: self.observe(name), is_running_after=is_running_after, timeout_s=timeout_s
        )

    def resume(self, name: str) -> ClusterJob:
        """Continue a suspended job from its newest checkpoint, or from its process image if the image is newer.

        Raises:
            ConflictError: the job is neither suspended nor being suspended, or its checkpoints are being deleted.
        """
        self._scaling.carry_on(name)
        seen = self.observe(name)
        check_keeps_checkpoints(seen.trainjob)
        job = describe(seen, place=self.place)
        check_can_resume(job)
        if texts(seen.trainjob, "metadata", "annotations").get(NODES) is not None:
            self._scaling.scale(seen, job, job.num_nodes)
            return self.job(name)
        release(self._api, seen)
        return self.job(name)

    def thaw(self, name: str) -> tuple[ClusterJob, PodImage]:
        """Continue a suspended job from its process image; see `image_to_thaw` and `resume`."""
        image = image_to_thaw(self.job(name))
        return self.resume(name), image

    def scale(self, name: str, num_nodes: int, *, timeout_s: float | None = None) -> ClusterJob:
        """Change a job's number of nodes. A running job is saved and stopped. A new TrainJob replaces the old one.

        A suspended job gets the new number of nodes when it is resumed.

        Raises:
            UsageError: the pods would not share the output location, their names would be too long, or the new
                TrainJob would be too large.
            ConflictError: Safepoint did not submit the job, the job has ended or is being deleted, or the claim is
                not ReadWriteMany.
            AccessDeniedError: you may not stop the job, see `check_may_stop`.
            WaitTimeoutError: the change is not complete; the next command that reads the job continues it.
        """
        self._scaling.carry_on(name, timeout_s=timeout_s)
        seen = self.observe(name)
        job = describe(seen, place=self.place)
        if job.state.is_over or job.state is JobState.DELETING:
            hint = (
                "to train further, delete it (its checkpoints stay) and submit it again"
                if job.state.is_over
                else None
            )
            raise ConflictError(f"job {name} is {job.state}", hint=hint)
        if not job.is_ours:
            raise ConflictError(
                f"Safepoint did not submit job {name}, so it is not known whether the job would resume from a "
                "checkpoint; nothing was done",
                hint="suspend the job, and submit it again with another number of nodes",
            )
        check_scaled(self._api, seen.trainjob, job.output, num_nodes)
        if num_nodes == job.num_nodes:
            return job
        if job.state is JobState.SUSPENDED:
            self._api.patch("trainjobs", name, {"metadata": {"annotations": {NODES: str(num_nodes)}}})
            return self.job(name)
        stopped = self._scaling.scale(seen, job, num_nodes, timeout_s=timeout_s)
        if stopped is None:
            return self.job(name)
        message = "" if stopped.receipt is None else stopped.receipt.text
        return replace(self.job(name), was_saved=stopped.was_saved, receipt=stopped.receipt, message=message)

    def delete(self, name: str, *, with_checkpoints: bool = False, timeout_s: float | None = None) -> int:
        """Delete a job and the objects that were made for it, and wait until they are gone; see `JobPlace.delete`."""
        num_deleted = delete_checkpoints(self, self._api, name, timeout_s) if with_checkpoints else 0
        plan = self._successions.plan(name)
        if plan is not None:
            self._successions.drop(plan)
        found = self._api.find("trainjobs", name)
        if (found is None and plan is None) or is_plan(found or {}):
            raise self._unknown(name)
        if found is None:
            return num_deleted
        own_left(self._api, found)
        self._api.delete("trainjobs", name, uid=uid_of(found))
        remaining = RemainingPods(self._api, name)

        def is_deleted() -> bool:
            if is_gone(self._api, name, uid_of(found)):
                return True
            with contextlib.suppress(AccessDeniedError):
                remaining.look()
            return False

        wait_until(
            is_deleted,
            f"job {name} was not deleted",
            timeout_s,
            "`safepoint list` shows the job until it is deleted",
        )
        return num_deleted

    def _unknown(self, name: str) -> NotFoundError:
        check_trainer(self._api)
        return UnknownJobError(
            f"there is no job {name} in namespace {self._api.namespace} of cluster {self.place}; nothing was done",
            name=name,
            known=names_of_jobs(self._api),
            hint="`safepoint list` with the same --on and --namespace shows the jobs",
        )

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
            SafepointError: the job has ended in a state that is not among `states`.
            WaitTimeoutError: the job did not reach one of the states in time.
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
