"""Resolves the location `job:NAME`, and sets the credentials with which a command opens object stores.

A command uses the same credentials for all stores. They come from the command's environment, from the data connection
in `--connection`, or from the job in `job:NAME`.
"""

import contextlib
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import typer

from safepoint.errors import NotFoundError, UsageError

_JOB = "job:"
_META = "safepoint.connection"
CLUSTER_JOB = "safepoint.cluster-job"
"""The key in `context.meta` for the `ClusterStorage` of the job in `job:NAME`, if the job is on a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStorage:
    """The cluster of a location, and the credentials with which a pod of the cluster opens object stores.

    Args:
        on: the place, as the option `--on` names it.
        namespace: the namespace; None for the namespace of the place.
        connection: the name of the Secret with the credentials; None if no Secret is used.
        env: environment variables of the job.
    """

    on: str
    namespace: str | None
    connection: str | None
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


def _connect(context: typer.Context, name: str | None) -> str | None:
    is_local = context.params.get("on") in {None, "local"}  # on a cluster, `name` is the name of a Secret
    # The check of a settings file (`cli/defaults.py`) calls this function with a context that has no parent. The
    # context of a command that runs has one.
    if name is not None and context.parent is not None and is_local:
        _use(context, name, {})
    return name


def find_place(context: typer.Context, text: str) -> str:
    """Resolve `job:NAME` to the output location of the job, and `job:NAME/checkpoint-20` to a checkpoint in it.

    If `text` names a job, the command uses the job's credentials for object stores. Any other location is
    returned unchanged.

    Raises:
        NotFoundError: there is no such job, or its output location is not known yet.
        ConflictError: several jobs match NAME.
        UsageError: the command already uses other credentials.
    """
    if not text.startswith(_JOB) or context.parent is None:  # see `_connect`
        return text
    from safepoint.cli.cluster_options import open_jobs
    from safepoint.jobs.model.records import JobRecord

    name, slash, rest = text.removeprefix(_JOB).partition("/")
    on, namespace = context.params.get("on"), context.params.get("namespace")
    with open_jobs(on, namespace, name) as jobs:
        job = jobs.job(name)
        output = jobs.output_of(job)
        if not isinstance(job, JobRecord):
            output = _note_cluster(context, jobs, job.name)
    if output is None:
        raise NotFoundError(
            f"job {job.name} has not reported its output location yet",
            hint="give the output location itself: its path or its URI",
        )
    if isinstance(job, JobRecord):
        _use(context, job.spec.data_connection, job.spec.env)
    return f"{output}{slash}{rest}"


def _note_cluster(context: typer.Context, jobs: object, name: str) -> str | None:
    """Record the cluster, the Secret and the variables of a cluster's job in the context of the command.

    Returns:
        The output location of the job; None if it is not known.
    """
    from safepoint.foundation.configuration import Configuration
    from safepoint.jobs.cluster.cluster_jobs import ClusterJobs

    assert isinstance(jobs, ClusterJobs)
    default = Configuration.of_user().default_place
    on = context.params.get("on") or (default.name if default is not None else ".")
    found = jobs.storage_of(name)
    storage = ClusterStorage(
        on=on, namespace=context.params.get("namespace"), connection=found.connection, env=found.env
    )
    before = context.meta.setdefault(CLUSTER_JOB, storage)
    if before != storage:
        raise UsageError(
            "the two jobs need different credentials for object stores, and one command cannot use both",
            hint="name one of the two locations by its path or its URI",
        )
    return found.output


def _use(context: typer.Context, name: str | None, env: Mapping[str, str]) -> None:
    before = context.meta.setdefault(_META, (name, dict(env)))
    if before != (name, dict(env)):
        raise UsageError(
            "the locations need different credentials for object stores, and one command cannot use both",
            hint="`job:NAME` has its own credentials, so omit --connection; or first copy one location to a local "
            "folder",
        )
    from safepoint.jobs.model.connections import keys_of

    use_keys(context, {} if name is None else keys_of(name), env)


def use_keys(context: typer.Context, keys: Mapping[str, str], env: Mapping[str, str]) -> None:
    """Add the keys of a connection, and `env`, to the environment. When the command ends, restore the environment."""
    context.with_resource(_identity(keys, env))


@contextlib.contextmanager
def _identity(keys: Mapping[str, str], env: Mapping[str, str]) -> Generator[None]:
    """Within this context, the environment also has the keys of a connection, and `env`."""
    from safepoint.jobs.model.connections import with_keys

    before = dict(os.environ)
    try:
        _replace_environment({**with_keys(before, keys), **env})
        yield
    finally:
        _replace_environment(before)


def _replace_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


_OF_FILE = "Read the access keys for the object store from the table NAME of ~/.config/safepoint/connections.toml."
Connection = Annotated[str | None, typer.Option("--connection", metavar="NAME", help=_OF_FILE, callback=_connect)]
ConnectionOrSecret = Annotated[
    str | None,
    typer.Option(
        "--connection",
        metavar="NAME",
        help=f"{_OF_FILE} With --on: read them from the Secret NAME.",
        callback=_connect,
    ),
]
