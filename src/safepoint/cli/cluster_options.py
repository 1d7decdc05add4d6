"""The options with which commands name the place of a job, and those of `submit` that only a cluster has."""

import contextlib
import dataclasses
import shlex
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safepoint.errors import UsageError
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.model.job_place import JobPlace

if TYPE_CHECKING:
    from safepoint.jobs.cluster.api import ClusterApi
    from safepoint.jobs.cluster.cluster_jobs import ClusterJobs

On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="PLACE",
        help="The cluster: the name of a context in your kubeconfig, or `.` for the current one.",
        show_default="this machine",
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="With --on: the namespace.", show_default="that of the context"),
]


@contextlib.contextmanager
def open_jobs(on: str | None, namespace: str | None) -> Generator[JobPlace[Any]]:
    """The jobs of the place that the options name: a cluster, or this machine."""
    if on is None:
        refuse_without_cluster(namespace)
        with LocalJobs() as jobs:
            yield jobs
    else:
        with connected(on, namespace) as jobs:
            yield jobs


def connected(on: str, namespace: str | None) -> "ClusterJobs":
    """The jobs of a cluster; to be closed. No request is sent yet."""
    from safepoint.jobs.cluster.cluster_jobs import ClusterJobs

    return ClusterJobs(cluster_api(on, namespace))


def cluster_api(on: str, namespace: str | None) -> "ClusterApi":
    """A namespace of a cluster; to be closed. No request is sent yet."""
    from safepoint.jobs.cluster.api import ClusterApi  # these libraries take 0.2 s to import
    from safepoint.jobs.cluster.connection import connect_to

    return ClusterApi(connect_to(None if on == "." else on, namespace=namespace))


def options_of(on: str | None, namespace: str | None) -> str:
    """The options that name the place in a command that a person may type next; empty for this machine."""
    given = (("--on", on), ("--namespace", namespace))
    return "".join(f" {name} {shlex.quote(text)}" for name, text in given if text is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """The options of `submit` that only a cluster has.

    Args:
        queue: Kueue's LocalQueue.
        priority_class: Kueue's WorkloadPriorityClass.
        runtime: the training runtime.
        image: the image, instead of the runtime's.
        memory: of each pod, as Kubernetes writes it.
        code: a folder whose files the job brings along.
        is_dry_run: print the objects, and create nothing.
    """

    queue: str | None = None
    priority_class: str | None = None
    runtime: str | None = None
    image: str | None = None
    memory: str | None = None
    code: Path | None = None
    is_dry_run: bool = False


def refuse_without_cluster(namespace: str | None, options: SubmitOptions | None = None) -> None:
    """Raise UsageError when options were given that have an effect on a cluster only."""
    given = (
        [] if options is None else [item.name for item in dataclasses.fields(options) if getattr(options, item.name)]
    )
    names = [name.removeprefix("is_").replace("_", "-") for name in (["namespace"] if namespace else []) + given]
    if names:
        raise UsageError(
            f"{', '.join(f'--{name}' for name in names)} has no effect on this machine",
            hint="name the cluster with --on, or leave it out",
        )
