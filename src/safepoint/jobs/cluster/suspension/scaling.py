"""Carries out the plan of a job that changes its number of nodes; see `safepoint.jobs.cluster.changes.successor`."""

import logging
from collections.abc import Callable
from dataclasses import replace

from safepoint.errors import ConflictError, NotFoundError, SafepointError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.plans import Plan
from safepoint.jobs.cluster.changes.submission import is_gone
from safepoint.jobs.cluster.changes.successor import Successions
from safepoint.jobs.cluster.objects import uid_of
from safepoint.jobs.cluster.state import ClusterJob, Observed, describe
from safepoint.jobs.cluster.suspension.stop import request_stop, wait_until
from safepoint.jobs.model.states import JobState

_log = logging.getLogger("safepoint")


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

    def carry_on(
        self,
        name: str,
        *,
        plan: Plan | None = None,
        stopped: ClusterJob | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Carry out the plan for a job, and wait until it is complete. If the job has no plan, do nothing."""
        plan = self._successions.plan(name) if plan is None else plan
        if plan is None:
            return
        what = f"job {name} was not scaled to {plan.num_nodes} nodes"

        def is_done() -> bool:
            again = self._successions.plan(name)
            return again is None or again.uid != plan.uid or self.step(again, stopped)

        wait_until(is_done, what, timeout_s, f"`safepoint status {name}` continues it")
        ended = self._api.find("trainjobs", name)
        if uid_of(ended) == plan.old_uid and stopped is not None:
            job = describe(self._observe(name), place=self._place)
            raise ConflictError(f"{what}: it is {job.state}" + (f": {job.message}" if job.message else ""))

    def step(self, plan: Plan, stopped: ClusterJob | None = None) -> bool:
        """Carry out the next step of a plan without waiting; returns whether the plan is complete or was given up."""
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
        elif job.state not in {JobState.SUSPENDING, JobState.DELETING}:
            request_stop(self._api, seen)
        return False

    def try_step(self, plan: Plan) -> bool:
        """Carry out the next step of a plan. If that fails, log a warning, so that the jobs are still listed."""
        try:
            return self.step(plan)
        except SafepointError as error:
            _log.warning("job %s cannot be scaled to %d nodes now: %s", plan.job, plan.num_nodes, error)
            return False
