"""Keeps the safe point of a job whose pods cannot post it, because the cluster has no status server of Trainer.

A pod writes its last safe point into its termination message. The cluster deletes the pods of a job that is suspended
or preempted, and the message with them. A command that watches the job has seen the message, and writes the step into
an annotation of the TrainJob. Later commands read this annotation. If no command watches, the step stays unknown
until the job runs again.
"""

import contextlib

from safepoint.errors import SafepointError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import at, name_of, uid_of
from safepoint.jobs.cluster.state import SAFE_STEP, Observed, describe


class SafePoints:
    """Writes the annotations of one namespace.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._kept: dict[str, int] = {}
        """For the uid of each TrainJob: the newest step that `keep` was called with, whether or not this step was
        written."""

    def keep(self, seen: Observed) -> None:
        """Write the step that the pods of a job have saved, if the cluster does not have it yet.

        A user who may not change the job gets no message: `watch` shows the step in any case.
        """
        step, uid = seen.saved_step, uid_of(seen.trainjob)
        if step is None or step <= self._kept.get(uid, -1):
            return
        without = describe(Observed(trainjob=seen.trainjob), place="").safe_step
        posts = at(seen.trainjob, "status", "trainerStatus") is not None
        self._kept[uid] = step
        if not posts and (without is None or without < step):
            change = {"metadata": {"uid": uid, "annotations": {SAFE_STEP: str(step)}}}
            with contextlib.suppress(SafepointError):
                self._api.patch("trainjobs", name_of(seen.trainjob), change)
