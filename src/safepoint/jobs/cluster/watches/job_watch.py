"""The objects of all jobs of a namespace, kept up to date by watches."""

import contextlib
import threading
from collections.abc import Iterator

from safepoint.errors import AccessDeniedError, SafepointError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import Object, at, name_of
from safepoint.jobs.cluster.state import JOBSET_LABEL, Observed
from safepoint.jobs.cluster.transport.failures import GoneError
from safepoint.jobs.cluster.watches.job_objects import objects_of_jobs

_KINDS = ("trainjobs", "pods", "workloads")
_AGAIN_S, _OPEN_S = 1.0, 240.0
_FIRST_S = 30.0


class JobWatch:
    """The jobs of a namespace as they are now. In its context, threads watch the objects.

    Args:
        api: the namespace.
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._objects: dict[str, dict[str, Object]] = {kind: {} for kind in _KINDS}
        self._lock = threading.Lock()
        self._is_over, self._has_changed = threading.Event(), threading.Event()
        self._has_begun = {kind: threading.Event() for kind in _KINDS}
        self._failure: SafepointError | None = None

    def __enter__(self) -> "JobWatch":
        for kind in _KINDS:
            threading.Thread(target=self._watch, args=(kind,), name=f"safepoint-{kind}", daemon=True).start()
        for begun in self._has_begun.values():
            begun.wait(_FIRST_S)
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until an object has changed, at most for this time."""
        self._has_changed.wait(timeout_s)
        self._has_changed.clear()

    def jobs(self) -> list[Observed]:
        """Each job with its TrainJob, its pods and its Workload.

        Raises:
            AccessDeniedError: you may not watch TrainJobs or pods.
        """
        if self._failure is not None:
            raise self._failure
        with self._lock:
            trainjobs, pods, workloads = (list(self._objects[kind].values()) for kind in _KINDS)
        return objects_of_jobs(trainjobs, pods, workloads)

    def _watch(self, kind: str) -> None:
        version = ""
        while not self._is_over.is_set():
            try:
                version = version or self._list(kind)
                for what, item in self._changes(kind, version):
                    version = str(at(item, "metadata", "resourceVersion"))
                    self._note(kind, what, item)
                self._is_over.wait(_AGAIN_S)
            except GoneError:
                version = ""
                self._is_over.wait(_AGAIN_S)
            except AccessDeniedError as error:
                if kind != "workloads":  # without Workloads, the state of a job in a queue is incomplete
                    self._failure = error
                self._begun(kind)
                return
            except SafepointError:
                self._is_over.wait(_AGAIN_S)

    def _changes(self, kind: str, version: str) -> Iterator[tuple[str, Object]]:
        labels = JOBSET_LABEL if kind == "pods" else ""
        with contextlib.closing(self._api.watch(kind, version=version, labels=labels, timeout_s=_OPEN_S)) as changes:
            for change in changes:
                if self._is_over.is_set():
                    return
                yield change

    def _list(self, kind: str) -> str:
        found, version = self._api.objects_at(kind, labels=JOBSET_LABEL if kind == "pods" else "")
        with self._lock:
            self._objects[kind] = {name_of(item): item for item in found}
        self._begun(kind)
        return version

    def _begun(self, kind: str) -> None:
        self._has_begun[kind].set()
        self._has_changed.set()

    def _note(self, kind: str, what: str, item: Object) -> None:
        with self._lock:
            if what == "DELETED":
                self._objects[kind].pop(name_of(item), None)
            else:
                self._objects[kind][name_of(item)] = item
        self._has_changed.set()
