"""The options that name where a job runs (this machine or a cluster), and the options of `submit` that have an effect
on a cluster only."""

import contextlib
import dataclasses
import shlex
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safepoint.cli.output import print_warning, without_effect
from safepoint.errors import ConflictError, NotFoundError, SafepointError, StorageError, UsageError
from safepoint.foundation.configuration import ClusterPlace, Configuration
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.model.job_place import JobPlace, UnknownJobError

if TYPE_CHECKING:
    from safepoint.jobs.cluster.api import ClusterApi
    from safepoint.jobs.cluster.cluster_jobs import ClusterJobs

THIS_MACHINE = "local"
"""The value of `--on` that means this machine. A user needs this value only if the settings have a default place."""
SHORT_S = 3.0
"""If a command names no place, a failing request to the default place is repeated for this time, in seconds."""

_PLACE = (
    "The cluster: the NAME of a table `[places.NAME]` in your settings, the name of a context in your kubeconfig, or "
    "`.` for the current context. `local` means this machine."
)
_OF_JOB = "this machine or your default place, whichever has the job"
On = Annotated[str | None, typer.Option("--on", metavar="PLACE", help=_PLACE, show_default="this machine")]
OnOfJob = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="PLACE",
        help=_PLACE,
        show_default=_OF_JOB,
    ),
]
OnOfList = Annotated[
    str | None,
    typer.Option("--on", metavar="PLACE", help=_PLACE, show_default="this machine and your default place, if any"),
]
OnOfWatch = Annotated[
    str | None,
    typer.Option("--on", metavar="PLACE", help=_PLACE, show_default=f"this machine; with JOB: {_OF_JOB}"),
]
Namespace = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The namespace in the cluster.",
        show_default="the namespace of the place, or else of the context",
    ),
]


@contextlib.contextmanager
def open_jobs(
    on: str | None, namespace: str | None, name: str | None = None, *, within_s: float | None = None
) -> Generator[JobPlace[Any]]:
    """The jobs of the place that `on` names.

    If `on` is None, the place is this machine. If the settings have a default place, there are two exceptions. With
    `namespace`, the place is the default place. With `name`, it is the place that has this job.

    Args:
        on: the place, as the option `--on` names it.
        namespace: the namespace of the cluster.
        name: the job that the command names.
        within_s: if the cluster is busy or out of reach, requests are repeated for this number of seconds; None for
            the default.

    Raises:
        ConflictError: both this machine and the default place have a job of this name.
        NotFoundError: neither this machine nor the default place has a job of this name.
    """
    if on is None:
        default = Configuration.of_user().default_place
        if default is not None and namespace is not None:
            on = default.name
        elif default is not None and name is not None:
            on = _place_of(name, default.name)
    cluster = cluster_of(on)
    if cluster is None:
        refuse_without_cluster(namespace)
        with LocalJobs() as jobs:
            yield jobs
    else:
        with connected(cluster, namespace, within_s=within_s) as jobs:
            yield jobs


def places_to_list(on: str | None, namespace: str | None) -> list[str | None]:
    """The values of `--on` for the places whose jobs `safepoint list` shows.

    If an option is given, the list has only the place that the options name. Without options, the list has this
    machine and, if the settings have a default place, also the default place.
    """
    default = Configuration.of_user().default_place
    if on is not None or namespace is not None or default is None:
        return [on]
    return [THIS_MACHINE, default.name]


def _place_of(name: str, default: str) -> str:
    """The place that has the job: this machine or the default place."""
    failure: SafepointError | None = None
    similar: set[str] = set()
    with LocalJobs() as jobs:
        found = [THIS_MACHINE] if _has(jobs, name, similar) else []
    try:
        with connected(default, None, within_s=SHORT_S) as jobs:
            found += [default] if _has(jobs, name, similar) else []
    except SafepointError as error:
        failure = error
    if len(found) > 1:
        raise ConflictError(
            f"this machine and cluster {default!r} both have a job {name!r}; nothing was done",
            hint=f"add --on {THIS_MACHINE} or --on {shlex.quote(default)}",
        )
    if failure is not None and found:
        print_warning(f"it is unknown whether place {default} also has a job {name}: {failure}")
    if found:
        return found[0]
    if failure is not None:
        raise failure
    raise UnknownJobError(
        f"there is no job {name!r} on this machine or on cluster {default!r}",
        name=name,
        known=similar,
        hint="`safepoint list` shows the jobs",
    )


def _has(jobs: JobPlace[Any], name: str, similar: set[str]) -> bool:
    """Whether the place has the job. If not, the name of the most similar job of the place is added to `similar`."""
    try:
        jobs.job(name)
    except UnknownJobError as error:
        similar |= {error.similar} - {""}
        return False
    except NotFoundError:
        return False
    except StorageError:
        if isinstance(jobs, LocalJobs):  # the job exists, but its entry cannot be read
            return True
        raise
    return True


def connected(
    on: str, namespace: str | None, *, within_s: float | None = None, is_read_only: bool = False
) -> "ClusterJobs":
    """The jobs of a cluster, as a context manager that closes the connections. No request is sent yet."""
    from safepoint.jobs.cluster.cluster_jobs import ClusterJobs

    return ClusterJobs(cluster_api(on, namespace, within_s=within_s), is_read_only=is_read_only)


def cluster_api(on: str, namespace: str | None, *, within_s: float | None = None) -> "ClusterApi":
    """A namespace of a cluster, as a context manager that closes the connections. No request is sent yet."""
    from safepoint.jobs.cluster.api import WITHIN_S, ClusterApi  # not at the top: the import takes 0.2 s
    from safepoint.jobs.cluster.connection import connect_to

    place = Configuration.of_user().places.get(on, ClusterPlace(name=on, context=None if on == "." else on))
    connection = connect_to(place.context, namespace=namespace or place.namespace)
    return ClusterApi(connection, within_s=WITHIN_S if within_s is None else within_s)


def cluster_of(on: str | None) -> str | None:
    """The cluster that `--on` names; None for this machine."""
    return None if on == THIS_MACHINE else on


def options_of(on: str | None, namespace: str | None) -> str:
    """` --on … --namespace …`, to append to a command that the output suggests; empty if neither option was given."""
    given = (("--on", on), ("--namespace", namespace))
    return "".join(f" {name} {shlex.quote(text)}" for name, text in given if text is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """The options of `submit` that have an effect on a cluster only.

    Args:
        queue: the name of Kueue's LocalQueue.
        priority_class: the name of Kueue's WorkloadPriorityClass.
        runtime: the name of the training runtime.
        image: the container image of the pods; None for the image of the runtime.
        memory: the memory of each pod, as Kubernetes writes it, such as `32Gi`.
        code: a folder whose files are sent to the pods.
        local_limit: with an object store, the size limit of the local folder for checkpoints, or `none` for no
            limit; None for a limit that is computed from the model, if the model is known.
        shared_memory: the size limit of /dev/shm in each pod; None for the memory of the pod.
        is_dry_run: print the Kubernetes objects of the job, and create nothing.
    """

    queue: str | None = None
    priority_class: str | None = None
    runtime: str | None = None
    image: str | None = None
    memory: str | None = None
    code: Path | None = None
    local_limit: str | None = None
    shared_memory: str | None = None
    is_dry_run: bool = False


def refuse_without_cluster(namespace: str | None, options: SubmitOptions | None = None) -> None:
    """Raise UsageError if `namespace` or one of `options` is set, because these have an effect on a cluster only."""
    values: dict[str, object] = {"--namespace": namespace}
    for item in dataclasses.fields(SubmitOptions) if options is not None else ():
        value = getattr(options, item.name)
        name = item.name.removeprefix("is_").replace("_", "-")
        values[f"--{name}"] = None if value == item.default else value
    _refuse(values, "on this machine", hint="name a cluster with --on, or omit the option")


def refuse_on_cluster(on: str, options: Mapping[str, object], *, hint: str = "omit the option") -> None:
    """Raise UsageError if one of the options is not None, because they have an effect on this machine only."""
    _refuse(options, f"with --on {on}", hint=hint)


def _refuse(options: Mapping[str, object], where: str, *, hint: str) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        hint = hint if len(given) == 1 else hint.replace("the option", "the options")
        raise UsageError(f"{without_effect(given)} {where}", hint=hint)


def given_options(context: typer.Context) -> frozenset[str]:
    """The names of the parameters that the command line, a variable or a file sets.

    A parameter that is set to its default value is included.
    """
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name != "DEFAULT")
