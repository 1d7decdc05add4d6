"""Sends requests to the API server of a cluster: the objects of a namespace, rights, watches, logs."""

import contextlib
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from safepoint.errors import AccessDeniedError, NotFoundError, TransientError, UsageError
from safepoint.foundation import clock
from safepoint.foundation.bounded import Work
from safepoint.jobs.cluster.connection import Connection
from safepoint.jobs.cluster.objects import Object, at, items, name_of, number
from safepoint.jobs.cluster.transport.client import REQUEST_S, Budget, Client, document
from safepoint.jobs.cluster.transport.failures import GoneError, TooMuchError, refusal

WITHIN_S = 30.0
"""For how long a request is repeated while the server is busy or out of reach."""
_PAGE = 500
_MOST_OBJECTS, _MOST_OBJECT_BYTES = 100_000, 256 << 20
_MOST_EVENT_BYTES = 16 << 20
_MOST_EXPIRED = 5
"""How many times a list is requested again from its first page after the API server has dropped a later page."""
_LIST_S = 600.0
_LATE_S = 10.0
_ASKED_S = 120.0
"""`find` waits this long for the reply to a request that `asked_ahead` sent. Then `find` sends the request again."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:_-]*[A-Za-z0-9])?")
_NAMES_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
_NAME_ONLY = _NAMES_ONLY.replace("MetadataList", "Metadata")
_WITHOUT_CONTENT = {"configmaps": {"accept": _NAME_ONLY}, "secrets": {"accept": _NAME_ONLY}}
"""For kinds whose content is large or secret: the headers of a request that creates or changes an object. With these
headers, the reply has only the metadata of the object."""
_GROUPS = {
    "trainjobs": "apis/trainer.kubeflow.org/v1alpha1",
    "trainingruntimes": "apis/trainer.kubeflow.org/v1alpha1",
    "clustertrainingruntimes": "apis/trainer.kubeflow.org/v1alpha1",
    "jobsets": "apis/jobset.x-k8s.io/v1alpha2",
    "jobs": "apis/batch/v1",
    "workloads": "apis/kueue.x-k8s.io/v1beta1",
    "localqueues": "apis/kueue.x-k8s.io/v1beta1",
    "workloadpriorityclasses": "apis/kueue.x-k8s.io/v1beta1",
    "selfsubjectaccessreviews": "apis/authorization.k8s.io/v1",
    "selfsubjectrulesreviews": "apis/authorization.k8s.io/v1",
    "events": "api/v1",
}
_CORE = "api/v1"
_OF_CLUSTER = {
    "clustertrainingruntimes",
    "workloadpriorityclasses",
    "selfsubjectaccessreviews",
    "selfsubjectrulesreviews",
    "nodes",
    "persistentvolumes",
}


class ClusterApi:
    """The objects of one namespace.

    Args:
        connection: the cluster, the namespace and the identity.
        within_s: how long a request is repeated while the server is busy or out of reach.
    """

    def __init__(self, connection: Connection, *, within_s: float = WITHIN_S) -> None:
        self.connection = connection
        self.namespace = connection.namespace
        self._client = Client(connection, within_s=within_s)
        self._asked: dict[tuple[str, str], Work[Object | None]] = {}

    @property
    def num_requests(self) -> int:
        """How many requests were sent so far."""
        return self._client.num_requests

    def now_s(self) -> float:
        """The API server's time, in seconds since 1970. Before the first answer, it is the time of this machine."""
        return self._client.now_s

    def close(self) -> None:
        """Close the connections. A thread that reads a stream, or sends a request later, gets an error."""
        self._client.close()

    def __enter__(self) -> "ClusterApi":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- objects --------------------------------------------------------------------------------------------------

    def get(self, kind: str, name: str) -> Object:
        """One object.

        Args:
            kind: the plural of its kind, such as `trainjobs`.
            name: its name.

        Raises:
            NotFoundError: there is no such object, or the cluster does not have this kind.
            AccessDeniedError: you may not read the object.
            TransientError: the cluster did not answer in time.
        """
        return self._client.request("GET", self._path(kind, name))

    def find(self, kind: str, name: str) -> Object | None:
        """One object; None if it does not exist, or if the cluster does not have this kind."""
        asked = self._asked.pop((kind, name), None)
        if asked is not None and asked.is_done(_ASKED_S):
            return asked.result(0)
        return self._find(kind, name)

    def _find(self, kind: str, name: str) -> Object | None:
        try:
            return self.get(kind, name)
        except NotFoundError:
            return None

    @contextlib.contextmanager
    def asked_ahead(self, wanted: Iterable[tuple[str, str]]) -> Generator[None]:
        """Send the requests for all objects that the `with` block will `find`, without waiting for the replies.

        In the block, the first `find` of each object returns the object in the reply, or raises the exception for the
        failed request.

        Args:
            wanted: the kind and the name of each of these objects.
        """
        self._asked = {key: Work(partial(self._find, *key)) for key in wanted}
        try:
            yield
        finally:
            self._asked = {}

    def objects(self, kind: str, *, labels: str = "", fields: str = "", has_content: bool = True) -> list[Object]:
        """All objects of a kind, or those that the selectors choose. Empty if the cluster does not have this kind.

        Args:
            kind: the plural of the kind.
            labels: a selector for labels, such as `safepoint.dev/job=train-1`.
            fields: a selector for fields, such as `type=Warning`.
            has_content: False returns only the metadata, for kinds whose contents are large or secret.

        Raises:
            TooMuchError: there are more than 100,000 objects, or they have more than 256 MiB.
            GoneError: the API server has dropped the next page of the list again and again.
        """
        return self.objects_at(kind, labels=labels, fields=fields, has_content=has_content)[0]

    def objects_at(
        self, kind: str, *, labels: str = "", fields: str = "", has_content: bool = True
    ) -> tuple[list[Object], str | None]:
        """The objects as `objects` returns them, and the version of the list, from which a watch can continue.

        The version is None if the cluster does not have this kind.
        """
        headers = {} if has_content else {"accept": _NAMES_ONLY}
        found: list[Object] = []
        budget = Budget(_MOST_OBJECT_BYTES, f"the {kind} of {self.connection.name}")
        marker, num_expired, until_s = "", 0, clock.monotonic_s() + _LIST_S
        while len(found) <= _MOST_OBJECTS:
            if clock.monotonic_s() > until_s:  # empty pages would never reach the limit of objects
                raise TransientError(
                    f"the list of {kind} of {self.connection.name} took more than {_LIST_S:g} s; nothing was done"
                )
            given: dict[str, str] = {
                "limit": str(_PAGE),
                "labelSelector": labels,
                "fieldSelector": fields,
                "continue": marker,
            }
            query = {name: value for name, value in given.items() if value}
            try:
                page: Any = self._client.request("GET", self._path(kind), query=query, headers=headers, budget=budget)
            except GoneError:  # the next page has expired: start over
                num_expired += 1
                if num_expired > _MOST_EXPIRED:
                    raise
                found, marker = [], ""
                continue
            except NotFoundError:
                return [], None
            found += (item for item in items(page, "items") if name_of(item))
            marker = str(at(page, "metadata", "continue") or "")
            if not marker:
                return found, str(at(page, "metadata", "resourceVersion") or "")
        raise TooMuchError(f"cluster {self.connection.name} has more than {_MOST_OBJECTS} {kind}; nothing was done")

    def create(self, kind: str, body: Object, *, is_dry_run: bool = False) -> Object:
        """Create an object. With `is_dry_run`, only check whether the object could be created.

        Returns:
            The object. For a config map or a Secret, only the metadata of the object.

        Raises:
            AlreadyExistsError: an object of this name exists.
            TransientError: the cluster did not answer, or could not say whether it has created the object.
            UnknownFieldError: `body` has a field that the cluster does not support. Nothing was created.
        """
        query = {"fieldValidation": "Strict", **({"dryRun": "All"} if is_dry_run else {})}
        headers = _WITHOUT_CONTENT.get(kind)
        is_safe = is_dry_run or kind.startswith("selfsubject")  # these create nothing
        return self._client.request(
            "POST", self._path(kind), query=query, body=body, headers=headers, is_safe=is_safe
        )

    def patch(self, kind: str, name: str, body: Object) -> Object:
        """Merge `body` into an object; a None in `body` deletes the field.

        If `body` has a resourceVersion, the object is changed only if it still has that version.

        Raises:
            ConflictError: the object has another version, or the cluster refuses the change.
        """
        headers = {"content-type": "application/merge-patch+json", **_WITHOUT_CONTENT.get(kind, {})}
        return self._client.request("PATCH", self._path(kind, name), body=body, headers=headers)

    def delete(self, kind: str, name: str, *, uid: str | None = None) -> None:
        """Delete an object, if it exists. The cluster then deletes the objects that this object owns.

        The object is deleted first, and then the objects that it owns (`Background`). In the other order, Trainer
        would make the JobSet of a TrainJob again, because the TrainJob would still exist.

        Args:
            kind: the plural of its kind.
            name: its name.
            uid: delete the object only if this is its uid.
        """
        body: Object = {"propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        with contextlib.suppress(NotFoundError):
            self._client.request("DELETE", self._path(kind, name), body=body)

    def may(self, verb: str, kind: str, *, subresource: str = "") -> bool:
        """Whether this identity may do `verb` with objects of a kind (see `group_of`) in the namespace."""
        attributes = {
            "namespace": None if kind in _OF_CLUSTER else self.namespace,
            "verb": verb,
            "group": self.group_of(kind),
            "resource": self.resource_of(kind),
            "subresource": subresource,
        }
        attributes = {name: value for name, value in attributes.items() if value is not None}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = self.create("selfsubjectaccessreviews", body)
        return at(answer, "status", "allowed") is True

    def rights(self) -> Callable[[str, str, str], bool]:
        """Return a function that takes a verb, a kind and a subresource, and returns whether this identity has the
        right.

        This sends one request for all rights in the namespace. The reply may omit some rights. So if the function
        returns False, call `may`, which checks one right.
        """
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": self.namespace},
        }
        rules = items(self.create("selfsubjectrulesreviews", body), "status", "resourceRules")

        def is_allowed(verb: str, kind: str, subresource: str) -> bool:
            resource = self.resource_of(kind) + (f"/{subresource}" if subresource else "")
            wanted = (("verbs", verb), ("apiGroups", self.group_of(kind)), ("resources", resource))
            unnamed = (rule for rule in rules if not items(rule, "resourceNames"))
            return any(all({"*", text} & set(items(rule, key)) for key, text in wanted) for rule in unnamed)

        return is_allowed

    def serves(self, kind: str) -> bool:
        """Whether the cluster has the API group of a kind, such as TrainJobs. Also True if you may not read the
        group."""
        try:
            self.read(f"/{_GROUPS[kind]}")
        except NotFoundError:
            return False
        except AccessDeniedError:
            return True
        return True

    def versions_of(self, kind: str) -> list[str]:
        """The versions in which the cluster has the API group of a kind; empty if it does not have the group, or if
        you may not read it. Safepoint itself uses only the version that `version_of` returns."""
        try:
            found = self.read(f"/apis/{self.group_of(kind)}")
        except (NotFoundError, AccessDeniedError):
            return []
        return [str(at(one, "version")) for one in items(found, "versions")]

    def version_of(self, kind: str) -> str:
        """The version of the API in which Safepoint reads and writes objects of a kind."""
        return _GROUPS.get(kind, _CORE).rpartition("/")[2]

    def group_of(self, kind: str) -> str:
        """The API group of a kind; empty for the core group, which has no name.

        A kind may be followed by a dot and its group, as in kubectl: `localqueues.visibility.kueue.x-k8s.io`.
        """
        named = kind.partition(".")[2]
        group = _GROUPS.get(kind, _CORE)
        return named or ("" if group == _CORE else group.split("/")[1])

    def resource_of(self, kind: str) -> str:
        """The plural of a kind, without its group; see `group_of`."""
        return kind.partition(".")[0]

    def is_of_cluster(self, kind: str) -> bool:
        """Whether objects of this kind belong to the whole cluster, and not to a namespace."""
        return kind in _OF_CLUSTER

    def read(self, path: str) -> Object:
        """The document at a path of the API server, such as `/version`."""
        return self._client.request("GET", path)

    def read_once(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        """The document at a path of the API server. The request is not repeated if it fails.

        Use this method for APIs that another server of the cluster provides. Such a server may never be reachable.
        """
        data = bytearray()
        with self._client.lines(path, query or {}, read_s=REQUEST_S) as lines:
            for line in lines:
                data += line
                if len(data) > _MOST_EVENT_BYTES:
                    raise TooMuchError(f"the answer to GET {path} has more than {_MOST_EVENT_BYTES:,} bytes")
        return document(bytes(data))

    # ---- streams --------------------------------------------------------------------------------------------------

    def watch(
        self, kind: str, *, version: str = "", labels: str = "", timeout_s: float = 300
    ) -> Generator[tuple[str, Object]]:
        """Yield each change of an object since `version`: ADDED, MODIFIED or DELETED, and the object.

        Without a version, all objects come first, as ADDED. The watch ends about `timeout_s` later, or when the
        server ends the connection. The caller can then continue with the version of the last object.

        Raises:
            GoneError: `version` is too old; list the objects again.
        """
        query = {
            "watch": "true",
            **({"resourceVersion": version} if version else {}),
            "timeoutSeconds": str(int(timeout_s)),
            "allowWatchBookmarks": "true",
            **({"labelSelector": labels} if labels else {}),
        }
        until_s = clock.monotonic_s() + timeout_s + _LATE_S
        with self._client.lines(
            self._path(kind), query, read_s=timeout_s + _LATE_S, most_line_bytes=_MOST_EVENT_BYTES
        ) as lines:
            for line in lines:
                if clock.monotonic_s() > until_s:  # end the watch, because the server has not ended it
                    return
                event = document(line)
                what, item = str(at(event, "type")), at(event, "object")
                if what == "ERROR" or not isinstance(item, dict):
                    status = cast(Object, item) if isinstance(item, dict) else {}
                    raise refusal(number(status, "code") or 500, status, f"watch {kind}")
                if what != "BOOKMARK":
                    yield what, cast(Object, item)

    def log(
        self,
        pod: str,
        container: str,
        *,
        follow: bool = False,
        previous: bool = False,
        tail: int | None = None,
        since: str | None = None,
    ) -> Iterator[str]:
        """The lines that a container has written.

        Args:
            pod: the name of the pod.
            container: the name of one of its containers.
            follow: wait for more lines until the container has ended.
            previous: return the lines from before the container's last restart.
            tail: return only this number of lines, from the end.
            since: a time (RFC 3339). Lines from before the second of this time are left out, and each line begins
                with its time and a space. An empty text returns all lines with their times; None returns all lines
                without times.

        Raises:
            NotFoundError: there is no such pod.
            UsageError: the container has not started yet, or has never restarted (with `previous`).
        """
        given: dict[str, Any] = {"container": container, "follow": follow, "previous": previous, "tailLines": tail}
        is_set = {name: value for name, value in given.items() if value is not None and value is not False}
        query = {name: str(value).lower() for name, value in is_set.items()}
        if since is not None:
            query |= {"timestamps": "true", **({"sinceTime": since} if since else {})}
        with self._client.lines(
            f"{self._path('pods', pod)}/log", query, read_s=None if follow else REQUEST_S
        ) as lines:
            yield from (line.decode(errors="replace") for line in lines)

    @contextlib.contextmanager
    def upgraded(
        self, pod: str, container: str, command: Sequence[str], *, headers: Mapping[str, str]
    ) -> Generator[Any]:
        """Start a program with empty input in a container, and yield the connection to the program.

        Args:
            pod: the name of the pod.
            container: one of its containers.
            command: the program and its arguments.
            headers: the headers that request the change from HTTP to WebSocket.

        Raises:
            AccessDeniedError: you may not run programs in pods.
            StorageError: the cluster, or a proxy before it, does not support WebSockets.
        """
        query = {"container": container, "stdout": "true", "stderr": "true", "command": list(command)}
        with self._client.upgraded(f"{self._path('pods', pod)}/exec", query, headers=headers) as stream:
            yield stream

    # ---- paths ----------------------------------------------------------------------------------------------------

    def check_name(self, name: str) -> None:
        """Raise UsageError for a name that could make the path of a request lead to another object."""
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is not a valid name on a cluster; nothing was done",
                hint="use letters, digits, dots and dashes, and begin and end with a letter or digit",
            )

    def _path(self, kind: str, name: str = "") -> str:
        for text in filter(None, (name, self.namespace)):
            self.check_name(text)
        namespace = "" if kind in _OF_CLUSTER else f"/namespaces/{self.namespace}"
        return f"/{_GROUPS.get(kind, _CORE)}{namespace}/{kind}" + (f"/{name}" if name else "")
