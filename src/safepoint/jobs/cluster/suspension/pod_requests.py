"""Runs a module of Safepoint in the first pod of a job, and returns what it answers.

The module prints lines of JSON: `{"waits": …}` while it waits, so that the connection stays in use, and at the end
its answer, or `{"error": …}` with or without `"hint"`.
"""

import json
from typing import Any

from safepoint.errors import AccessDeniedError, SafepointError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import at, items, name_of
from safepoint.jobs.cluster.pod_archive import module_command
from safepoint.jobs.cluster.pods.pod_fields import container_status, is_training_pod, node_of
from safepoint.jobs.cluster.state import Observed
from safepoint.jobs.cluster.suspension.pod_program import run_in_pod

MOST_S = 900.0
"""How long a request may take."""
_IDLE_S = 30.0


def ask_first_pod(api: ClusterApi, seen: Observed, module: str, *arguments: str, limit_s: float) -> tuple[str, Any]:
    """Run a module in the pod of the first node, with the limit in seconds as its first argument.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        seen: the objects of a running job that Safepoint submitted.
        module: the module.
        arguments: its further arguments.
        limit_s: how long it may take.

    Returns:
        The name of the pod, and the last JSON value that the module has printed.

    Raises:
        SafepointError: the module was not run, or it failed. The message is a clause that can follow "because".
    """
    training = [pod for pod in seen.pods if is_training_pod(pod) and at(container_status(pod), "state", "running")]
    first = next((pod for pod in training if node_of(pod) == 0), None)
    if first is None:
        raise SafepointError("its first pod does not run")
    own = items(seen.trainjob, "spec", "trainer", "command")
    command = module_command(own, module, f"{limit_s:g}", *arguments)
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
        why, hint = at(answer, "error") or error.message, at(answer, "hint")
        raise SafepointError(
            f"the request in pod {name_of(first)} failed: {why}", hint=hint if isinstance(hint, str) else None
        ) from error
    return name_of(first), answer


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
