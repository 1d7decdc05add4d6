"""The plan to change a job's number of nodes. A TrainJob stores the plan. This module sends no requests.

For the change, a new TrainJob, the *successor*, replaces the old TrainJob; see `successor`. A third TrainJob stores
the plan: one of its annotations has the text of the plan, and its name has the digest of this text. A plan is carried
out only if its digest is in the name. A person who may change TrainJobs, but may not create them, cannot change the
name, and so cannot change a plan either.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from safepoint.jobs.cluster.objects import Object, at, name_of, texts, uid_of
from safepoint.jobs.cluster.spec import DOMAIN, PLAN, PLAN_LABEL, QUEUE_LABEL, is_plan, plan_name
from safepoint.jobs.cluster.state import HISTORY, SAFE_STEP

ENDED = f"{DOMAIN}/ended"
"""An annotation of the TrainJob that keeps a plan: notes, as JSON, on how the old TrainJob has ended. The successor
gets these notes as annotations. Without this annotation, the old TrainJob may still run."""

_NO_QUEUE = "no-queue.safepoint.dev"
"""The name of a queue that does not exist. Each TrainJob that keeps a plan names this queue. Otherwise Kueue would
put the TrainJob into the queue `default` of the namespace, if there is such a queue, and would start the TrainJob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan to replace a job's TrainJob by one with another number of nodes.

    Args:
        document: the TrainJob that keeps the plan.
        job: the name of the job.
        old_uid: the uid of the TrainJob to replace.
        num_nodes: the new number of nodes.
        actor: the user who requested the change.
        planned: the new TrainJob, without notes about the end of the old TrainJob.
        notes: the notes about the end of the old TrainJob; None while that TrainJob may still run.
    """

    document: Object
    job: str
    old_uid: str
    num_nodes: int
    actor: str
    planned: Object
    notes: Mapping[str, str] | None

    @property
    def uid(self) -> str:
        """The uid of the TrainJob that keeps the plan."""
        return uid_of(self.document)

    @property
    def successor(self) -> Object | None:
        """The new TrainJob; None while the old TrainJob may still run."""
        if self.notes is None:
            return None
        metadata = self.planned["metadata"]
        return {**self.planned, "metadata": {**metadata, "annotations": {**metadata["annotations"], **self.notes}}}


def plans_among(trainjobs: Iterable[Object]) -> list[Plan]:
    """The plans in these TrainJobs that may be carried out, oldest first.

    A plan is not carried out if another person has changed it, or if its TrainJob is being deleted. (A finalizer
    could keep such a TrainJob for ever.)
    """
    found = [plan for item in trainjobs if (plan := read_plan(item))]
    return sorted(found, key=lambda plan: (str(at(plan.document, "metadata", "creationTimestamp")), plan.uid))


def changed_among(trainjobs: Iterable[Object]) -> list[Object]:
    """The TrainJobs whose plans are not carried out because another person has changed them."""
    plans = [item for item in trainjobs if is_plan(item) and not at(item, "metadata", "deletionTimestamp")]
    return [item for item in plans if read_plan(item) is None]


def document_of(old: Object, content: str) -> Object:
    """The TrainJob that keeps the plan for `old`. This TrainJob is suspended, and in no queue that exists. If a
    person resumes it, its pod runs the program `true`, and ends."""
    return {
        "apiVersion": old["apiVersion"],
        "kind": old["kind"],
        "metadata": {
            "name": plan_name(content),
            "labels": {PLAN_LABEL: name_of(old), QUEUE_LABEL: _NO_QUEUE},
            "annotations": {PLAN: content},
        },
        "spec": {
            "suspend": True,
            "runtimeRef": at(old, "spec", "runtimeRef"),
            "trainer": {"numNodes": 1, "command": ["true"]},
        },
    }


def read_plan(item: Object) -> Plan | None:
    """The plan that a TrainJob keeps; None if there is no plan, or if the plan is not carried out."""
    if not is_plan(item) or at(item, "metadata", "deletionTimestamp"):
        return None
    try:
        notes = texts(item, "metadata", "annotations")
        content = notes[PLAN]
        if plan_name(content) != name_of(item):
            return None
        data = json.loads(content)
        planned = data["successor"]
        if not _is_trainjob(planned):
            return None
        return Plan(
            document=item,
            job=name_of(planned),
            old_uid=str(data["old"]),
            num_nodes=int(data["nodes"]),
            actor=str(data["actor"]),
            planned=cast("Object", planned),
            notes=_read_notes(notes.get(ENDED)),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError):
        return None


def _read_notes(text: str | None) -> dict[str, str] | None:
    """The notes for the successor; None if `text` is None. Another person may have changed the notes, so invalid
    notes are dropped."""
    if text is None:
        return None
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {name: value for name in (HISTORY, SAFE_STEP) if isinstance(value := at(found, name), str)}


def _is_trainjob(planned: Any) -> bool:
    """Whether the fields of `planned` have the types that the API server requires. `planned` comes from an
    annotation, and the API server does not check the content of annotations."""
    metadata = at(planned, "metadata")
    is_noted = all(_is_of_texts(at(metadata, key)) for key in ("labels", "annotations"))
    return bool(name_of(planned)) and isinstance(at(planned, "spec"), dict) and is_noted


def _is_of_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in cast("Object", value).values())
