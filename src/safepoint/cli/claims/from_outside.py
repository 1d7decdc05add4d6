"""`--on PLACE` for the commands about checkpoints, and for those that read process images. PLACE names a cluster.

A command opens an object store from this machine. For a claim (a volume of the cluster), the whole command runs in a
pod that mounts the claim. This process first checks the command line, and later prints the output of the pod.
"""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from typer.core import TyperOption

from safepoint.cli.output import without_effect
from safepoint.cli.place import CLUSTER_JOB, ClusterStorage, use_keys
from safepoint.errors import UsageError, printable
from safepoint.foundation.configuration import Configuration
from safepoint.foundation.events import console
from safepoint.foundation.events.answer_frames import Part
from safepoint.storage.location import Location, parse_location, resolve_claim

_LOCAL = "local"
_LOCATIONS = ("location", "source", "target", "before", "after")
_WRITTEN = {
    "adopt": "location",
    "prune": "location",
    "repair": "location",
    "copy": "target",
    "export": "target",
}
"""For each command that writes: the argument with the location to write to. Other commands mount a claim
read-only."""
_OURS = ("on", "namespace", "image", "memory")
_NO_COLOUR, _FROM_THE_BEGINNING = "\x1b[0m", "\r\x1b[K"
_COLOUR = re.compile(r"(\x1b\[[0-9;:]{0,40}m)")

_On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="PLACE",
        help="The cluster to use for a pvc:// claim, for job:NAME, or for the Secret of --connection. PLACE is the "
        "NAME of a table `[places.NAME]` in your settings, the name of a context in your kubeconfig, or `.` for the "
        "current context.",
        show_default="this machine",
        is_eager=True,  # parsed first, because `job:NAME` and --connection depend on --on
    ),
]
_Namespace = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --on: the namespace.",
        show_default="the namespace of the place, or else of the context",
        is_eager=True,
    ),
]
_Image = Annotated[
    str | None,
    typer.Option(
        metavar="IMAGE",
        help="If a location is pvc:// on a cluster, the command runs in a pod. This is the image of that pod.",
        show_default="the image of the newest job that uses the claim; if there is no such job, the image of the "
        "runtime torch-distributed; if there is no such runtime, the image of another runtime",
    ),
]
_Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="If a location is pvc:// on a cluster, the command runs in a pod. This is the memory of that pod.",
        show_default="2Gi",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """The values of the options that `with_clusters` adds to a command."""

    on: str | None
    namespace: str | None
    image: str | None
    memory: str | None


def with_clusters(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--on`, `--namespace`, `--image` and `--memory`. The command then works for claims too."""
    own = inspect.signature(command).parameters

    @functools.wraps(command)
    def with_place(context: typer.Context, **values: Any) -> Any:
        given = _Given(**{name: values.pop(name) for name in _OURS})
        storage = _storage_of(context, given, values)
        locations = {name: _parsed(values[name]) for name in _LOCATIONS if name in values}
        claims = _claims_of(locations, is_placed=storage is not None)
        if storage is None and claims and (default := Configuration.of_user().default_place) is not None:
            storage = ClusterStorage(on=default.name, namespace=given.namespace, connection=values["connection"])
        if storage is not None and claims:
            _refuse_folders(locations)
            _refuse_key(values)
            _run_in_pod(context, values, claims, storage, given)
            return
        _refuse_pod_options(given)
        _check_claims(locations)
        if storage is not None and not any(location.is_remote for location in locations.values()):
            raise UsageError(
                f"--on {storage.on} has no effect: {', '.join(map(str, locations.values()))} "
                f"{'is' if len(locations) == 1 else 'are'} on this machine",
                hint="with --on, give pvc://CLAIM/PATH, an object store or job:NAME",
            )
        if storage is not None:
            _use_keys_of(context, storage)
        elif given.namespace is not None:
            raise UsageError("--namespace has no effect on this machine", hint="name the cluster with --on")
        command(**values)

    options = {
        "on": (_On, None),
        "namespace": (_Namespace, None),
        "image": (_Image, None),
        "memory": (_Memory, None),
    }
    spread: Any = with_place
    parameters = [
        inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own.values()),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
            for name, (kind, default) in options.items()
        ),
    ]
    spread.__signature__ = inspect.Signature(parameters)
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread


def _storage_of(context: typer.Context, given: _Given, values: Mapping[str, Any]) -> ClusterStorage | None:
    """The cluster that the command names, by `--on` or by `job:NAME`; None if it names no cluster."""
    found: ClusterStorage | None = context.meta.get(CLUSTER_JOB)
    if found is not None:
        return found if values["connection"] is None else replace(found, connection=values["connection"])
    if given.on is None or given.on == _LOCAL:
        return None
    return ClusterStorage(on=given.on, namespace=given.namespace, connection=values["connection"])


def _parsed(text: str) -> Location:
    try:
        return parse_location(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _claims_of(locations: Mapping[str, Location], *, is_placed: bool) -> tuple[str, ...]:
    """The claims for which this machine has no folder. If `is_placed` (the command names a cluster): all claims."""
    claims: dict[str, None] = {}
    for location in locations.values():
        if location.claim is None:
            continue
        try:
            resolve_claim(location)
        except ValueError:
            claims[location.claim] = None
        else:
            if is_placed:
                claims[location.claim] = None
    return tuple(claims)


def _check_claims(locations: Mapping[str, Location]) -> None:
    """Raise UsageError if this machine has no folder for one of the claims."""
    for location in locations.values():
        try:
            resolve_claim(location)
        except ValueError as error:
            raise UsageError(
                str(error), hint="to use a claim of a cluster, name the cluster with --on PLACE"
            ) from error


def _refuse_folders(locations: Mapping[str, Location]) -> None:
    folders = [str(location) for location in locations.values() if location.is_folder]
    if folders:
        raise UsageError(
            f"{', '.join(folders)} is a folder of this machine, which the pod with the claim cannot reach; "
            "nothing was done",
            hint="use another claim or an object store",
        )


def _refuse_key(values: Mapping[str, Any]) -> None:
    if values.get("key") is not None:
        raise UsageError(
            f"--key {values['key']} is a file of this machine, and the command runs in a pod. Safepoint sends no "
            "keys of images to a pod; nothing was done",
            hint="omit --key: then the images are read without a key",
        )


def _refuse_pod_options(given: _Given) -> None:
    names = [f"--{name}" for name in ("image", "memory") if getattr(given, name) is not None]
    if names:
        what = "the option" if len(names) == 1 else "the options"
        raise UsageError(f"{without_effect(names)}: no pod is needed", hint=f"omit {what}, or give --on and a claim")


def _use_keys_of(context: typer.Context, storage: ClusterStorage) -> None:
    """Set the keys of the connection's Secret in the environment until the command has ended."""
    # This import is not at the top, because this module is loaded in pods too, and the archive in a pod has no
    # `jobs`.
    from safepoint.jobs.model.connections import plain_variables

    if storage.connection is None:
        use_keys(context, {}, plain_variables(storage.env))
        return
    from safepoint.cli.cluster_options import cluster_api
    from safepoint.jobs.cluster.helper.job_storage import secret_values

    with cluster_api(storage.on, storage.namespace) as api:
        keys = secret_values(api, storage.connection)
    use_keys(context, keys, plain_variables(storage.env))


# ---- commands that run in a pod --------------------------------------------------------------------------------


def _run_in_pod(
    context: typer.Context, values: Mapping[str, Any], claims: tuple[str, ...], storage: ClusterStorage, given: _Given
) -> None:
    """Run the command in a pod that mounts the claims, and print its output as it comes."""
    from safepoint.cli.cluster_options import cluster_api
    from safepoint.jobs.cluster.helper.helper import run_helper
    from safepoint.jobs.cluster.helper.helper_objects import DEFAULT_MEMORY, HelperRequest

    log = console.set_up(0)
    written = values.get(_WRITTEN.get(str(context.command.name), ""), "")
    env = dict(storage.env)
    if console.is_interactive():
        env["SAFEPOINT_HELPER_TERMINAL"] = "1"
    env |= {name: os.environ[name] for name in ("NO_COLOR",) if name in os.environ}
    request = HelperRequest(
        arguments=words_of(context, values),
        claims=claims,
        is_read_only=bool(values.get("dry_run")) or not str(written).lower().startswith("pvc:"),
        connection=storage.connection,
        env=env,
        image=given.image,
        memory=given.memory or DEFAULT_MEMORY,
    )
    with cluster_api(storage.on, storage.namespace) as api:
        code = run_helper(api, request, print_part, say=lambda text: log.info("%s", text))
    if code:
        raise typer.Exit(code)


def words_of(context: typer.Context, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The command line for the pod. It has the values that were typed, and the values from variables and settings
    files.

    The options that only the command outside the pod uses, such as `--on`, are left out.
    """
    options: list[str] = []
    arguments: list[str] = []
    for param in context.command.params:
        name = str(param.name)
        value = values.get(name)
        if name in {*_OURS, "connection"} or value is None:
            continue
        if not isinstance(param, TyperOption):
            arguments.append(str(value))
        elif param.is_flag:
            options += [param.opts[-1]] if value else []
        else:
            options.append(f"{param.opts[-1]}={value}")
    return (*context.command_path.split()[1:], *options, "--", *arguments)


def print_part(part: Part, text: str) -> None:
    """Print output of the pod. On a terminal, escape control characters, except in colours and progress lines."""
    stream = sys.stdout if part is Part.STDOUT else sys.stderr
    if stream.isatty():
        pieces = _COLOUR.split(text)
        text = "".join(piece if number % 2 else _plain(piece, part) for number, piece in enumerate(pieces))
        text += _NO_COLOUR if len(pieces) > 1 else ""
    encoding = stream.encoding or "utf-8"
    # The name of a file may contain characters that cannot be encoded.
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _plain(text: str, part: Part) -> str:
    """The text with its control characters escaped, except in progress lines.

    A progress line on stderr begins with a carriage return, which makes the terminal write over the previous text.
    The returned text also erases the previous text. If it did not, the end of a longer previous text would remain.
    """
    progress = _FROM_THE_BEGINNING if part is Part.STDERR else None
    kept = {"\n": "\n", "\r": progress or "\\r"}
    return "".join(kept.get(letter) or printable(letter) for letter in text)
