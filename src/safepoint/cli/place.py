"""Resolves the location `job:NAME`, and sets the keys with which a command opens object stores.

A command uses one set of keys for all stores: those in its environment, those of the data connection in
`--connection`, or those of the job in `job:NAME`.
"""

import contextlib
import os
from collections.abc import Generator, Mapping
from typing import Annotated

import typer

from safepoint.errors import NotFoundError, UsageError

_JOB = "job:"
_META = "safepoint.connection"


def _connect(context: typer.Context, name: str | None) -> str | None:
    if name is not None and context.parent is not None:  # without a parent, Typer runs no command
        _use(context, name, {})
    return name


def find_place(context: typer.Context, text: str) -> str:
    """The output location of the job in `job:NAME`, or its checkpoint in `job:NAME/checkpoint-20`.

    The command then uses the job's keys. Any other location is returned unchanged.

    Raises:
        NotFoundError: there is no such job, or its output location is not known yet.
        ConflictError: several jobs match.
        UsageError: the command already uses other keys.
    """
    if not text.startswith(_JOB):
        return text
    from safepoint.jobs.local.local_jobs import LocalJobs

    name, slash, rest = text.removeprefix(_JOB).partition("/")
    with LocalJobs() as jobs:
        job = jobs.job(name)
        output = jobs.output_of(job)
    if output is None:
        raise NotFoundError(
            f"job {job.name} has not reported its output location yet",
            hint="give the output location itself: its path or address",
        )
    _use(context, job.spec.data_connection, job.spec.env)
    return f"{output}{slash}{rest}"


def _use(context: typer.Context, name: str | None, env: Mapping[str, str]) -> None:
    before = context.meta.setdefault(_META, (name, dict(env)))
    if before != (name, dict(env)):
        raise UsageError(
            "the locations need different object store keys, and a command can use only one set of keys",
            hint="`job:NAME` has its own keys, so omit --connection; or first copy one location to a local folder",
        )
    context.with_resource(_identity(name, env))


@contextlib.contextmanager
def _identity(name: str | None, env: Mapping[str, str]) -> Generator[None]:
    """Set the keys of the connection `name`, and `env`, in the environment until the command has ended."""
    from safepoint.jobs.model.connections import keys_of, with_keys

    before = dict(os.environ)
    try:
        _replace_environment({**with_keys(before, {} if name is None else keys_of(name)), **env})
        yield
    finally:
        _replace_environment(before)


def _replace_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


Connection = Annotated[
    str | None,
    typer.Option(
        "--connection",
        metavar="NAME",
        help="Use the object store keys of table NAME in ~/.config/safepoint/connections.toml.",
        callback=_connect,
    ),
]
