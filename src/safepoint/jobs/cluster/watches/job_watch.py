"""The objects of all jobs of a namespace, kept up to date by watches."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace

from safepoint.errors import AccessDeniedError, SafepointError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import Object, at, name_of, size_of, texts
from safepoint.jobs.cluster.pods.pod_fields import JOBSET_LABEL, own_pods, saved_step
from safepoint.jobs.cluster.state import Observed
from safepoint.jobs.cluster.transport.failures import TooMuchError
from safepoint.jobs.cluster.watches.job_objects import objects_of_jobs

_log = logging.getLogger("safepoint")
_KINDS = ("trainjobs", "pods", "workloads")
_AGAIN_S, _OPEN_S = 1.0, 240.0
_ABSENT_S = 60.0
"""The time between two looks for a kind that the cluster does not have, such as Workloads without Kueue."""
_FIRST_S = 30.0
_OLD_S = 30.0
"""After this time without an answer, a warning says that the shown state may be out of date."""
_MOST_OBJECTS, _MOST_BYTES = 100_000, 256 << 20


class Kept:
    """The objects of one kind, by name, with a limit for their number and a limit for their size.

    Args:
        kind: the plural of the kind, for the message.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._objects: dict[str, tuple[Object, int]] = {}
        self._num_bytes = 0

    def add(self, item: Object) -> None:
        """Keep an object. It replaces the object with the same name.

        Raises:
            TooMuchError: there are too many objects, or they are too large.
        """
        self.drop(item)
        num_bytes = size_of(item)
        if len(self._objects) >= _MOST_OBJECTS or self._num_bytes + num_bytes > _MOST_BYTES:
            raise TooMuchError(
                f"the namespace has more than {_MOST_OBJECTS} {self._kind}, or they have more than {_MOST_BYTES:,} "
                "bytes; they are not watched"
            )
        self._objects[name_of(item)] = item, num_bytes
        self._num_bytes += num_bytes

    def drop(self, item: Object) -> None:
        """Remove the object with the name of `item`."""
        _, num_bytes = self._objects.pop(name_of(item), (None, 0))
        self._num_bytes -= num_bytes

    @property
    def objects(self) -> list[Object]:
        """All objects."""
        return [item for item, _ in self._objects.values()]


class JobWatch:
    """The jobs of a namespace as they are now. Threads watch the objects until the `with` block ends.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._objects = {kind: Kept(kind) for kind in _KINDS}
        self._lock = threading.Lock()
        self._is_over, self._has_changed = threading.Event(), threading.Event()
        self._has_begun = {kind: threading.Event() for kind in _KINDS}
        self._failure: SafepointError | None = None
        self._unanswered: dict[str, tuple[float, str, SafepointError]] = {}
        """For each kind that cannot be watched at present: the time when this began (on the monotonic clock, and in
        UTC), and the error."""
        self._has_warned = False
        self._saved: dict[str, int] = {}
        """For each job: the newest step that a pod saved before the pod ended. The step is kept here, because the
        cluster deletes the pods of a preempted job."""

    def __enter__(self) -> "JobWatch":
        for kind in _KINDS:
            threading.Thread(target=self._watch, args=(kind,), name=f"safepoint-{kind}", daemon=True).start()
        for begun in self._has_begun.values():
            begun.wait(_FIRST_S)
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until an object has changed, but at most `timeout_s`."""
        self._has_changed.wait(timeout_s)
        self._has_changed.clear()

    def jobs(self) -> list[Observed]:
        """Each job with its TrainJob, its pods and its Workload (Kueue's object for a job in a queue), and with the
        step that its pods have saved since this watch began.

        Raises:
            AccessDeniedError: you may not watch TrainJobs or pods.
            TooMuchError: there are too many TrainJobs or pods, or they are too large.
        """
        if self._failure is not None:
            raise self._failure
        self._warn_if_old()
        with self._lock:
            trainjobs, pods, workloads = (self._objects[kind].objects for kind in _KINDS)
            saved = {**self._saved}
        found = objects_of_jobs(trainjobs, pods, workloads)
        return [replace(seen, saved_step=saved.get(name_of(seen.trainjob))) for seen in found]

    def _warn_if_old(self) -> None:
        """Log one warning for each period in which the API server does not answer."""
        with self._lock:
            unanswered = sorted(self._unanswered.values(), key=lambda one: one[0])
        if not unanswered:
            self._has_warned = False
            return
        since_s, since, error = unanswered[0]
        if not self._has_warned and clock.monotonic_s() - since_s >= _OLD_S:
            self._has_warned = True
            _log.warning(
                "requests to the cluster have failed since %s: %s; the shown state of the jobs of %s may be out of "
                "date; the requests are repeated every second",
                since,
                error.message,
                self._api.connection.name,
            )

    def _watch(self, kind: str) -> None:
        version = ""
        while not self._is_over.is_set():
            try:
                if not version:
                    listed = self._list(kind)
                    if listed is None:  # the cluster does not have this kind, so a watch of it would fail
                        self._is_over.wait(_ABSENT_S)
                        continue
                    version = listed
                for what, item in self._changes(kind, version):
                    version = str(at(item, "metadata", "resourceVersion"))
                    self._note(kind, what, item)
                self._is_over.wait(_AGAIN_S)
            except (AccessDeniedError, TooMuchError) as error:
                # Without Workloads, the jobs can still be shown. Only the state of a job in a queue is incomplete.
                if kind != "workloads":
                    self._failure = error
                self._begun(kind)
                return
            except SafepointError as error:
                # List the objects again, for two reasons: the version may have expired, and only `_list` records that
                # the API server answers again.
                version = ""
                with self._lock:
                    self._unanswered.setdefault(kind, (clock.monotonic_s(), clock.utc_now(), error))
                self._is_over.wait(_AGAIN_S)

    def _changes(self, kind: str, version: str) -> Iterator[tuple[str, Object]]:
        labels = JOBSET_LABEL if kind == "pods" else ""
        with contextlib.closing(self._api.watch(kind, version=version, labels=labels, timeout_s=_OPEN_S)) as changes:
            for change in changes:
                if self._is_over.is_set():
                    return
                yield change

    def _list(self, kind: str) -> str | None:
        """List the objects of a kind. Returns the version of the list; None if the cluster lacks this kind."""
        found, version = self._api.objects_at(kind, labels=JOBSET_LABEL if kind == "pods" else "")
        kept = Kept(kind)
        for item in found:
            kept.add(item)
        with self._lock:
            self._objects[kind] = kept
            self._unanswered.pop(kind, None)
        self._begun(kind)
        return version

    def _begun(self, kind: str) -> None:
        self._has_begun[kind].set()
        self._has_changed.set()

    def _note(self, kind: str, what: str, item: Object) -> None:
        with self._lock:
            if what == "DELETED":
                self._objects[kind].drop(item)
            else:
                self._objects[kind].add(item)
            if kind == "pods":
                self._note_save(item)
            elif kind == "trainjobs" and what == "DELETED":
                self._saved.pop(name_of(item), None)
        self._has_changed.set()

    def _note_save(self, pod: Object) -> None:
        """Keep the step that the pod saved before the pod ended."""
        job, step = texts(pod, "metadata", "labels").get(JOBSET_LABEL, ""), saved_step([pod])
        if step is not None and own_pods(job, [pod]) and len(self._saved) < _MOST_OBJECTS:
            self._saved[job] = max(step, self._saved.get(job, 0))
