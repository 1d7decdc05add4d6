"""The options with which commands name a cluster, and those of `submit` that only a cluster has. Quick to import."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from safepoint.errors import UsageError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a command looks for jobs.

    Args:
        on: the name of a context in the kubeconfig, or `.` for the current one.
        namespace: None for that of the context.
    """

    on: str
    namespace: str | None = None


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
