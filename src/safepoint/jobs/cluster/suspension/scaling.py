"""Carries out the plan to change a job's number of nodes; see `safepoint.jobs.cluster.changes.successor`.

A command that changes jobs holds the lease of a plan, and carries out the whole plan. A command that only reads jobs
carries out one step of a plan, and only if no command holds the lease. A command that only reads jobs never stops a
job that trains, because it cannot wait for a save.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from safepoint.errors import AccessDeniedError, ConflictError, NotFoundError, SafepointError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.plan_lease import PlanLease, is_held
from safepoint.jobs.cluster.changes.plans import Plan
from safepoint.jobs.cluster.changes.submission import is_gone
from safepoint.jobs.cluster.changes.successor import Successions
from safepoint.jobs.cluster.objects import name_of, uid_of
from safepoint.jobs.cluster.state import ClusterJob, Observed, describe
from safepoint.jobs.cluster.suspension.stop import check_may_stop, request_stop, stop_job, wait_until
from safepoint.jobs.model.states import JobState

_log = logging.getLogger("safepoint")
_UNTRAINED = {
    JobState.QUEUED,
    JobState.INADMISSIBLE,
    JobState.PREEMPTED,
    JobState.STARTING,
    JobState.RESUMING,
}
"""The states of a job that does not train. A stop of such a job loses no steps."""


class Scaling:
    """Carries out the plans of one namespace.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        successions: the plans of this namespace.
        observe: returns the objects of a job as they are now, or raises NotFoundError.
        place: the name of the cluster in messages.
    """

    def __init__(
        self, api: ClusterApi, successions: Successions, observe: Callable[[str], Observed], *, place: str
    ) -> None:
        self._api, self._successions, self._observe, self._place = api, successions, observe, place
        self._reported: set[str] = set()

    # ---- commands that change jobs --------------------------------------------------------------------------------

    def scale(
        self, seen: Observed, job: ClusterJob, num_nodes: int, *, timeout_s: float | None = None
    ) -> ClusterJob | None:
        """Write the plan for a job that has no plan, and carry it out.

        Returns:
            The job as it was stopped, with its receipt; None if it was suspended before.

        Raises:
            AccessDeniedError: you may not stop the job; nothing was done.
            ConflictError: the job has ended, or another person has resumed it; the plan was given up.
            WaitTimeoutError: the change is not complete; another command can continue it.
        """
        check_may_stop(self._api, seen, job)
        with PlanLease(self._api) as lease:
            plan = self._successions.write(seen.trainjob, job, num_nodes, notes=lease.annotations)
            stopped = self._carry_out(plan, lease, timeout_s)
        ended = self._api.find("trainjobs", job.name)
        if uid_of(ended) == plan.old_uid:
            job = describe(self._observe(job.name), place=self._place)
            why = f"it is {job.state}" + (f": {job.message}" if job.message else "")
            raise ConflictError(f"job {job.name} was not scaled to {num_nodes} nodes: {why}")
        return stopped

    def carry_on(self, name: str, *, timeout_s: float | None = None) -> None:
        """Wait until the plan for a job is complete. If no other command carries out the plan, carry it out here.

        If the job has no plan, do nothing.
        """
        plan = self._successions.plan(name)
        if plan is not None:
            with PlanLease(self._api) as lease:
                self._carry_out(plan, lease, timeout_s)

    def _carry_out(self, plan: Plan, lease: PlanLease, timeout_s: float | None) -> ClusterJob | None:
        """Carry out a plan, and wait until it is complete. Returns the job if this command stopped it; otherwise
        None."""
        deadline_s = None if timeout_s is None else clock.monotonic_s() + timeout_s
        stopped: ClusterJob | None = None

        def stop(plan: Plan, seen: Observed, job: ClusterJob) -> None:
            nonlocal stopped
            left_s = None if deadline_s is None else max(0.0, deadline_s - clock.monotonic_s())
            try:
                stopped = stop_job(self._api, lambda: self._observe(plan.job), place=self._place, timeout_s=left_s)
            except ConflictError:  # the job has ended, another person has resumed it, or a rule refuses the stop
                self._successions.drop(plan)
                raise

        def is_done() -> bool:
            again = self._successions.plan(plan.job)
            if again is None or again.uid != plan.uid:
                return True
            return lease.takes(again) and self._step(again, stop, stopped)

        wait_until(
            is_done,
            f"job {plan.job} was not scaled to {plan.num_nodes} nodes",
            timeout_s,
            f"`safepoint scale {plan.job} --nnodes {plan.num_nodes}` completes the change",
        )
        return stopped

    def _step(
        self, plan: Plan, stop: Callable[[Plan, Observed, ClusterJob], None], stopped: ClusterJob | None = None
    ) -> bool:
        """Carry out the next step of a plan; returns whether the plan is complete or was given up.

        Args:
            plan: the plan, as it was just read.
            stop: called if the old TrainJob has to be stopped.
            stopped: the job as this command has stopped it; None if this command has not stopped it.
        """
        try:
            seen = self._observe(plan.job)
        except NotFoundError:
            if plan.successor is None:
                self._successions.drop(plan)
            elif is_gone(self._api, plan.job, plan.old_uid):
                self._successions.create(plan)
            return plan.successor is None
        job = describe(seen, place=self._place)
        if job.uid != plan.old_uid:
            self._successions.finish(plan, seen.trainjob)
            return True
        if job.state.is_over:
            self._successions.drop(plan)
            return True
        self._successions.check(plan, seen.trainjob)
        if job.state is JobState.SUSPENDED:
            safe_step = stopped.safe_step if stopped is not None else job.safe_step
            self._successions.release(plan, seen.trainjob, replace(job, safe_step=safe_step))
        elif job.state is not JobState.DELETING:
            stop(plan, seen, job)
        return False

    # ---- commands that read jobs ----------------------------------------------------------------------------------

    def try_step(self, plan: Plan) -> bool:
        """Carry out the next step of a plan without waiting, if no other command carries out the plan.

        If the step fails, a warning is logged, and the jobs are still shown. A user who may not change the job gets
        no warning.

        Returns:
            Whether the plan is complete or was given up.
        """
        if is_held(plan, self._api.now_s()):
            return False
        try:
            return self._step(plan, self._stop_untrained)
        except AccessDeniedError as error:
            _log.debug("job %s is not scaled to %d nodes here: %s", plan.job, plan.num_nodes, error)
        except SafepointError as error:
            _log.warning("job %s cannot be scaled to %d nodes now: %s", plan.job, plan.num_nodes, error)
        return False

    def _stop_untrained(self, plan: Plan, seen: Observed, job: ClusterJob) -> None:
        """Request the stop of a job that does not train."""
        if job.state in _UNTRAINED:
            request_stop(self._api, seen)
        elif job.state is not JobState.SUSPENDING and name_of(plan.document) not in self._reported:
            self._reported.add(name_of(plan.document))
            _log.warning(
                "job %s trains on with its old number of nodes, because the `scale` to %d nodes was interrupted; "
                "`safepoint scale %s --nnodes %d` completes the change",
                job.name,
                plan.num_nodes,
                job.name,
                plan.num_nodes,
            )
