"""Requests a checkpoint of a running job before it is suspended; see `safepoint.training.launcher.save_request`."""

import json
from typing import Any

from safepoint.errors import AccessDeniedError, SafepointError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import at, items, name_of
from safepoint.jobs.cluster.pod_archive import module_command
from safepoint.jobs.cluster.pods.pod_fields import container_status, is_training_pod, node_of
from safepoint.jobs.cluster.records.receipts import receipt_of
from safepoint.jobs.cluster.state import ClusterJob, Observed
from safepoint.jobs.cluster.suspension.pod_program import run_in_pod
from safepoint.jobs.model.receipts import Receipt

_MOST_S, _IDLE_S = 900.0, 30.0
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
    training = [pod for pod in seen.pods if is_training_pod(pod) and at(container_status(pod), "state", "running")]
    first = next((pod for pod in training if node_of(pod) == 0), None)
    if first is None:
        raise SafepointError("its first pod does not run")
    limit_s = _MOST_S if within_s is None else min(_MOST_S, within_s)
    own = items(seen.trainjob, "spec", "trainer", "command")
    command = module_command(own, _MODULE, f"{limit_s:g}")
    if command is None:
        raise SafepointError("the command of its pods was written by another release of Safepoint")
    container = str(at(container_status(first), "name") or "node")
    answer: Any = {}
    try:
        for line in run_in_pod(api, name_of(first), container, command, idle_s=_IDLE_S, limit_s=limit_s + _IDLE_S):
            answer = _parsed(line) or answer
    except AccessDeniedError as error:
        raise AccessDeniedError("you are not allowed to create and get pods/exec") from error
    except SafepointError as error:
        why = at(answer, "error") or error.message
        raise SafepointError(f"the request in pod {name_of(first)} failed: {why}") from error
    receipt = receipt_of(at(answer, "receipt"), output=job.output, was_requested=True)
    if receipt is None:
        raise SafepointError(f"pod {name_of(first)} gave no receipt")
    return receipt


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
