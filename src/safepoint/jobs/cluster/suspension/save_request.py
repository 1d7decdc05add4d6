"""Requests a checkpoint of a running job before it is suspended; see `safepoint.training.launcher.save_request`."""

from safepoint.errors import SafepointError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import at
from safepoint.jobs.cluster.records.receipts import receipt_of
from safepoint.jobs.cluster.state import ClusterJob, Observed
from safepoint.jobs.cluster.suspension.pod_requests import MOST_S, ask_first_pod
from safepoint.jobs.model.receipts import Receipt

_MODULE = "safepoint.training.launcher.save_request"


def request_save(api: ClusterApi, job: ClusterJob, seen: Observed, *, within_s: float | None) -> Receipt:
    """Request a save. After the save, the ranks wait for a limited time. If the job is not suspended in this time,
    the ranks continue.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        job: a running job that Safepoint submitted.
        seen: the objects of the job.
        within_s: how long the save, the upload and the check may take together, at most 15 minutes; None for 15
            minutes. The request in the pod also fails if the save alone takes more than a minute and more than three
            times as long as expected.

    Raises:
        SafepointError: no save was requested, or no checkpoint was made. The message is a clause that can follow
            "because".
    """
    limit_s = MOST_S if within_s is None else min(MOST_S, within_s)
    pod, answer = ask_first_pod(api, seen, _MODULE, limit_s=limit_s)
    receipt = receipt_of(at(answer, "receipt"), output=job.output, was_requested=True)
    if receipt is None:
        raise SafepointError(f"pod {pod} did not report which checkpoint it saved")
    return receipt
