"""How the pods of a job end: exit codes and termination messages, which are lost when the pods are deleted."""

import threading
from typing import Any

from safepoint.errors import ExitCode, SafepointError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import Object, at, name_of, number
from safepoint.jobs.cluster.pods.pod_fields import (
    JOBSET_LABEL,
    container_status,
    is_training_pod,
    message_at_end,
    node_of,
    own_pods,
    step_in,
)
from safepoint.progress.trainer_status import CHECKPOINT, PROCESS_IMAGE

_AGAIN_S, _OPEN_S, _LAST_EVENTS_S = 1.0, 5.0, 3.0
_MOST_PODS, _MOST_NAME = 10_000, 253


class PodEnds:
    """How the pods of a job end.

    Enter this context before the job is stopped, because the cluster deletes pods within a second after their end.
    The context lists the pods and opens a watch, which records how each pod ends.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        name: the name of the job.
    """

    def __init__(self, api: ClusterApi, name: str) -> None:
        self._api, self._name = api, name
        self._codes: dict[str, int] = {}
        self._running: set[str] = set()
        """The pods that have run, and whose end the watch has not reported yet."""
        self._is_over = threading.Event()
        self._is_open = threading.Event()
        self.safe_step: int | None = None
        """The step that the pod of node 0 has saved, from its termination message; None if it reported no save."""
        self.checkpoint: Any = None
        """The checkpoint that the pod of node 0 checked when it ended, see `CheckpointReceipt`; None if unknown."""
        self.image: Any = None
        """The process image that the pod of node 0 made at its deadline, as the pod describes it; None if unknown."""
        self._thread = threading.Thread(target=self._watch, name="safepoint-pods", daemon=True)

    def __enter__(self) -> "PodEnds":
        self._thread.start()
        self._is_open.wait(_OPEN_S)
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()

    def wait_for_last(self) -> None:
        """Wait until the watch has reported at least one end, and the end of each pod that has run; at most 3 s."""
        deadline_s = clock.monotonic_s() + _LAST_EVENTS_S
        while (self._running or not self._codes) and clock.monotonic_s() < deadline_s:
            clock.sleep(0.1)

    @property
    def is_saved(self) -> bool | None:
        """Whether every pod that has ended so far has saved; None before the watch has reported an end."""
        if not self._codes:
            return None
        return all(code in {ExitCode.OK, ExitCode.INTERRUPTED_SAVED} for code in self._codes.values())

    def _watch(self) -> None:
        labels, version = f"{JOBSET_LABEL}={self._name}", ""
        while not self._is_over.is_set():
            try:
                version = version or self._list(labels)
                for what, pod in self._api.watch("pods", version=version, labels=labels, timeout_s=60):
                    version = str(at(pod, "metadata", "resourceVersion") or "")
                    self._note(pod, is_deleted=what == "DELETED")
                    if self._is_over.is_set():
                        return
            except SafepointError:
                version = ""  # it may have expired
            self._is_over.wait(_AGAIN_S)

    def _list(self, labels: str) -> str:
        """Note the pods that there are, and return the version from which the watch continues."""
        pods, version = self._api.objects_at("pods", labels=labels)
        self._running &= set(map(name_of, pods))
        for pod in pods:
            self._note(pod, is_deleted=False)
        self._is_open.set()  # a job may have no pods
        return version or ""

    def _note(self, pod: Object, *, is_deleted: bool) -> None:
        if not is_training_pod(pod) or not own_pods(self._name, [pod]):
            return
        name, state = name_of(pod), at(container_status(pod), "state")
        if at(state, "running") is not None and not is_deleted:
            self._codes.pop(name, None)  # the end that was recorded does not count: the container has started again
            self._running.add(name)
            return
        ended = at(state, "terminated")
        # Count only containers that ran; a deleted container has an exit code even if it never ran.
        if at(ended, "startedAt") is not None:
            self._note_end(pod, ended)
        if ended is not None or is_deleted:
            self._running.discard(name)

    def _note_end(self, pod: Object, ended: Any) -> None:
        code = number(ended, "exitCode")
        name = name_of(pod)
        if len(name) > _MOST_NAME or (len(self._codes) >= _MOST_PODS and name not in self._codes):
            return
        self._codes[name] = code
        if node_of(pod) == 0 and (message := message_at_end(ended)) is not None:
            self.checkpoint = at(message, CHECKPOINT)
            self.image = at(message, PROCESS_IMAGE)
            self.safe_step = step_in(message)
