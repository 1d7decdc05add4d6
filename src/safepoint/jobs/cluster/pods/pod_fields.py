"""Which pods belong to a job, which of them train, and how their containers ended. This module sends no requests."""

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from safepoint.errors import ExitCode
from safepoint.foundation.quantities import parse_whole
from safepoint.jobs.cluster.objects import Object, at, condition, items, name_of, number, texts

JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
"""The label of a job's pods, with the name of the job. A pod that has this label, but whose name is not derived from
the name of the job, is ignored; see `own_pods`."""
PART_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
"""The label of a pod with the name of its replicated job, the part of the job that the pod belongs to."""
NODE = "node"
"""The usual name of the replicated job that trains. The container that trains always has this name."""
INITIALIZERS = ("dataset-initializer", "model-initializer")
"""The names of the replicated jobs that fetch the dataset and the model before the pods train."""
_MOST_STEPS = 10**15
_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"


def is_training_pod(pod: Object) -> bool:
    """Whether a pod of a job trains. The other pods of a job run initializers.

    A runtime may give any name to the replicated job that trains. But Trainer starts the program only in a container
    named `node`.
    """
    part = texts(pod, "metadata", "labels").get(PART_LABEL, NODE)
    if part == NODE:
        return True
    return part not in INITIALIZERS and node_container(pod) is not None


def node_container(pod: Object) -> Any:
    """The specification of the pod's container that trains; None if it has none."""
    return next((one for one in items(pod, "spec", "containers") if at(one, "name") == NODE), None)


def variable_of(pod: Object, name: str) -> str | None:
    """The value of a variable in the pod's containers; None if no container has it."""
    entries = [entry for container in items(pod, "spec", "containers") for entry in items(container, "env")]
    return next((str(at(entry, "value") or "") for entry in entries if at(entry, "name") == name), None)


def training_pods(pods: Iterable[Object]) -> list[Object]:
    """The pods that train, in the order of their indexes."""
    return sorted(filter(is_training_pod, pods), key=node_of)


def node_of(pod: Object) -> int:
    """The pod's index in the job (torchrun's node rank)."""
    return parse_whole(texts(pod, "metadata", "labels").get(_INDEX_LABEL, "0")) or 0


def own_pods(name: str, pods: Iterable[Object]) -> list[Object]:
    """Select the pods whose names show that they belong to the job `name`.

    All of `pods` have the label of this job. But a person who may change the metadata of pods can add this label to
    any pod. The name of a pod cannot be changed. JobSet and the job controller derive the names of a job's pods from
    the name of the job: `NAME-node-0-INDEX-abcde`.
    """
    return [pod for pod in pods if _is_own(name, pod)]


def _is_own(name: str, pod: Object) -> bool:
    labels = texts(pod, "metadata", "labels")
    part = re.escape(labels.get(PART_LABEL, NODE))
    # The job controller writes the index into the name of each pod of an indexed job. The names of initializers' pods
    # may have no index. Before Kubernetes 1.28, pods have no label with the index.
    index = f"-{node_of(pod)}" if _INDEX_LABEL in labels else "(-[0-9]+)?"
    pattern = rf"{re.escape(name)}-{part}-[0-9]+{index}-[a-z0-9]{{5}}"
    return re.fullmatch(pattern, name_of(pod)) is not None


def container_status(pod: Object) -> Any:
    """The status of the pod's container that trains; None before the container exists."""
    found = items(pod, "status", "containerStatuses")
    return next((status for status in found if at(status, "name") == NODE), found[0] if found else None)


def container_state(pod: Object) -> dict[str, Any]:
    """The state of the pod's container that trains: a dict with the key `waiting`, `running` or `terminated`. Empty
    if the container has no state."""
    return at(container_status(pod), "state") or {}


def num_restarts(pod: Object) -> int:
    """How many times the pod's container that trains has restarted."""
    return number(container_status(pod), "restartCount")


def runs_or_is_done(pod: Object) -> bool:
    """Whether the pod's container that trains runs, or has ended with exit code 0."""
    state = container_state(pod)
    return "running" in state or at(state, "terminated", "exitCode") == 0


def is_leaving(pod: Object) -> bool:
    """Whether the pod is being deleted."""
    return at(pod, "metadata", "deletionTimestamp") is not None


def why_leaving(pod: Object) -> str:
    """Why the pod is being deleted."""
    cause = condition(pod, "DisruptionTarget")
    why = str(at(cause, "message") or at(cause, "reason") or "it is being deleted")
    return f"pod {name_of(pod)}: {why}"


def how_ended(pod: Object) -> str:
    """How the pod's container last ended."""
    status = container_status(pod)
    ended = at(status, "state", "terminated") or at(status, "lastState", "terminated")
    if ended is None:
        return "it has ended"
    reason = str(at(ended, "reason") or "")
    code = at(ended, "exitCode")
    return "out of memory (OOMKilled)" if reason == "OOMKilled" else f"exit code {code}"


def message_at_end(ended: Any) -> Any:
    """What the pod wrote when its container ended with a save (its termination message); None if it did not save.

    Args:
        ended: the field `terminated` of the container's state.
    """
    if at(ended, "exitCode") != ExitCode.INTERRUPTED_SAVED:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(str(at(ended, "message") or ""))
    return None


def saved_step(pods: Iterable[Object]) -> int | None:
    """The newest step that the pod of node 0 has saved at its end, or before its last restart; None if it reports
    no save."""
    steps: list[int] = []
    for pod in pods:
        if not is_training_pod(pod) or node_of(pod) != 0:
            continue
        for state in ("state", "lastState"):
            step = step_in(message_at_end(at(container_status(pod), state, "terminated")))
            steps += [] if step is None else [step]
    return max(steps, default=None)


def step_in(message: Any) -> int | None:
    """The step in a termination message; None if it has none. A pod may write any text."""
    step = at(message, "currentStep")
    return step if type(step) is int and 0 <= step <= _MOST_STEPS else None


def exit_code_of(pods: Sequence[Object]) -> int | None:
    """The first code other than 0 among the pods that train; 0 if all ended with 0; otherwise None."""
    ended = [at(container_status(pod), "state", "terminated") for pod in training_pods(pods)]
    codes = [None if one is None else number(one, "exitCode") for one in ended]
    return next((code for code in codes if code), 0 if codes and None not in codes else None)


def first_failed(pods: Sequence[Object]) -> Object | None:
    """The pod that failed first; None if no pod that trains has failed."""
    failed: list[tuple[str, Object]] = []
    for pod in training_pods(pods):
        status = container_status(pod)
        ended = at(status, "state", "terminated") or at(status, "lastState", "terminated")
        if ended is not None and at(ended, "exitCode"):
            failed.append((str(at(ended, "finishedAt") or ""), pod))
    return min(failed, key=lambda pair: pair[0])[1] if failed else None


def first_cause(pods: Sequence[Object]) -> str:
    """Which pod failed first, and how; empty if no pod failed."""
    pod = first_failed(pods)
    return "" if pod is None else f"pod {name_of(pod)}: {how_ended(pod)}"


def other_grace(pods: Sequence[Object], grace_s: float) -> str:
    """A sentence about pods whose grace period differs from `grace_s`. Empty if there are no such pods.

    The two can differ: an admission webhook may change the pods, and a person may change the runtime later.

    Args:
        pods: the pods of a job.
        grace_s: the grace period in seconds that Safepoint in the pods was started with.
    """
    given = [at(pod, "spec", "terminationGracePeriodSeconds") for pod in training_pods(pods)]
    others = sorted(real for real in given if type(real) is int and real != grace_s)
    if not others:
        return ""
    effect = f"a save that takes longer than {others[0]} s is lost" if others[0] < grace_s else "the rest is not used"
    return (
        f"the pods have a grace period of {others[0]} s, and Safepoint in them was started with {grace_s:g} s: "
        f"{effect}; to change this, submit the job again with --grace"
    )
