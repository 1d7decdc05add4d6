"""`safepoint dashboard`: jobs and checkpoints in a browser."""

import contextlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safepoint.cli.cluster_options import THIS_MACHINE, connected
from safepoint.errors import MissingExtraError
from safepoint.foundation.configuration import Configuration
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.model.job_place import JobPlace
from safepoint.jobs.model.records import this_user

if TYPE_CHECKING:
    from safepoint.dashboard.reading.places import OpenJobs

_NEEDED = ("starlette", "uvicorn", "jinja2")


def dashboard(
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The address to listen on. Any address but loopback needs TLS.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            metavar="PORT",
            help="The port; 0 for any free port. If you choose a port that an earlier dashboard has used, first "
            "close that dashboard's pages in your browser, and delete the site data of its address. docs/security.md "
            "says why.",
            min=0,
            max=65535,
        ),
    ] = 0,
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--on",
            metavar="PLACE",
            help="A place whose jobs are shown, as for `safepoint list`; may be given several times.",
            show_default="this machine and your default place, if any",
        ),
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Every visitor may only read.")] = False,
    gpu_price: Annotated[
        float, typer.Option(metavar="NUMBER", help="Price of an hour of a GPU, for the page of costs.", min=0)
    ] = 0.0,
    cpu_price: Annotated[
        float, typer.Option(metavar="NUMBER", help="Price of an hour of a core, for jobs without GPUs.", min=0)
    ] = 0.0,
    bucket_size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LOCATION=SIZE",
            help="For the page of storage: the size limit of a location in an object store, such as "
            "s3://models/team=2T; may be given several times.",
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A certificate (PEM), to answer over TLS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The key of the certificate (PEM).")] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="A further host name by which browsers reach the dashboard."),
    ] = None,
    proxy_address: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="The address or network of a proxy that signs users in, and names the user in the header "
            "--user-header.",
        ),
    ] = None,
    proxy_user: Annotated[
        list[str] | None,
        typer.Option(
            metavar="USER",
            help="Needed if the proxy runs on this machine as a user other than you and root: the name of that user.",
        ),
    ] = None,
    user_header: Annotated[
        str, typer.Option(metavar="HEADER", help="The header in which the proxy names the user.")
    ] = "X-Forwarded-User",
    operator: Annotated[
        list[str] | None,
        typer.Option(
            metavar="USER",
            help="A user of the proxy who may change something; may be given several times. All other users may only "
            "read.",
        ),
    ] = None,
) -> None:
    """Show jobs and checkpoints in a browser, and act on them.

    The command prints a link with a token that works once. Ctrl-C ends the dashboard; the jobs continue.
    """
    missing = [module for module in _NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise MissingExtraError(
            f"the dashboard needs {', '.join(missing)}; nothing was started",
            hint="pip install 'safepoint[dashboard]'",
        )
    from safepoint.dashboard.serving import serve
    from safepoint.dashboard.settings import DashboardSettings, bucket_sizes, networks, user_numbers

    settings = DashboardSettings(
        host=host,
        port=port,
        is_read_only=read_only,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        names=tuple(name or ()),
        proxies=networks(proxy_address or ()),
        proxy_users=user_numbers(proxy_user or ()),
        user_header=user_header,
        operators=tuple(operator or ()),
        gpu_price=gpu_price,
        cpu_price=cpu_price,
        bucket_sizes=bucket_sizes(bucket_size or ()),
    )
    default = Configuration.of_user().default_place
    chosen = on or [THIS_MACHINE, *([default.name] if default is not None else [])]
    serve(settings, {place: _opener(place) for place in dict.fromkeys(chosen)}, typer.echo)


def _opener(place: str) -> "OpenJobs":
    if place == THIS_MACHINE:
        return _open_local
    return _cluster_opener(place)


def _open_local(actor: str) -> contextlib.AbstractContextManager[JobPlace[Any]]:
    return LocalJobs(actor=f"{this_user()} ({actor})" if actor == "dashboard" else actor)


def _cluster_opener(place: str) -> Callable[[str], contextlib.AbstractContextManager[JobPlace[Any]]]:
    # With the actor `dashboard`, an open page reads jobs. These reads must not change a job, so they do not continue
    # a change that was interrupted. The actor is not passed on, because the API server of a cluster knows who acts.
    return lambda actor: connected(place, None, is_read_only=actor == "dashboard")
